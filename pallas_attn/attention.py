"""Take the public attention functions from a caller's arguments to a problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pallas_attn.dispatch import Implementation
from pallas_attn.operands import operand
from twin_attention.contract.operands import describe_operands


class Attention(NamedTuple):
    """A public attention function, which returns out and lse.

    `check` takes described operands and checked options, and returns the problem; `run` takes
    operands, problem, implementation and return_lse.
    """

    operands: type[Any]
    check_options: Callable[..., Any]
    check: Callable[[Any, Any], Any]
    run: Callable[..., Any]

    def __call__(
        self,
        operands: tuple[Any, ...],
        options: tuple[Any, ...],
        implementation: Implementation | None,
    ) -> Any:
        """Run the public function; return_lse is the last option."""
        given, checked = self.operands(*operands), self.check_options(*options)
        spec = self.check(describe_operands(given, operand), checked)
        return self.run(given, spec, implementation, options[-1])

    def problem(self, **arguments: Any) -> tuple[Any, Any]:
        """Check a public call; return operands and problem."""
        operands = self.operands(*(arguments.pop(name) for name in self.operands._fields))
        checked = self.check_options(**arguments)
        return operands, self.check(describe_operands(operands, operand), checked)
