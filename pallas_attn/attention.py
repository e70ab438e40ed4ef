"""Take the public attention functions from a caller's arguments to a problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pallas_attn.dispatch import Implementation
from pallas_attn.operands import operand
from twin_attention.contract.operands import describe_operands


class Attention(NamedTuple):
    """A public attention function, which returns out and lse.

    Attributes:
        operands: the class of its operands.
        check_options: check options as the caller gave them.
        check: check described operands, with checked options, and return the problem.
        run: compute it from operands, problem, implementation, and whether lse is returned.
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
        """Run the public function on the caller's arguments.

        Args:
            operands: in the order of their class.
            options: the other arguments, in the order of `check_options`; return_lse comes last.
            implementation: what the caller asked for.

        Returns:
            out; with return_lse the pair (out, lse).
        """
        given, checked = self.operands(*operands), self.check_options(*options)
        spec = self.check(describe_operands(given, operand), checked)
        return self.run(given, spec, implementation, options[-1])

    def problem(self, **arguments: Any) -> tuple[Any, Any]:
        """Check the arguments of the public function and return operands and problem."""
        operands = self.operands(*(arguments.pop(name) for name in self.operands._fields))
        checked = self.check_options(**arguments)
        return operands, self.check(describe_operands(operands, operand), checked)
