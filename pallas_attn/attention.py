"""Take the public attention functions from a caller's arguments to a problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pallas_attn.derivatives import constant
from pallas_attn.dispatch import Implementation
from pallas_attn.operands import check_sizes, in_float32, operand
from pallas_attn.varying import alike
from twin_attention.contract.operands import CONSTANTS, WIDENED, describe_operands


class Attention(NamedTuple):
    """A public attention function, which returns out and lse."""

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
        given, checked = _ready(self.operands(*operands)), self.check_options(*options)
        spec = self.check(describe_operands(given, operand), checked)
        if implementation != "reference":
            check_sizes(given)
        return self.run(alike(given), spec, implementation, options[-1])

    def problem(self, **arguments: Any) -> tuple[Any, Any]:
        operands = _ready(self.operands(*map(arguments.pop, self.operands._fields)))
        checked = self.check_options(**arguments)
        return operands, self.check(describe_operands(operands, operand), checked)


def _ready(operands: Any) -> Any:
    """Return operands with constants marked, and sinks and slopes in float32."""
    given = {name: x for name, x in operands._asdict().items() if x is not None}
    marked = {name: constant(name, given[name]) for name in CONSTANTS if name in given}
    given |= marked
    return operands._replace(**{name: in_float32(given[name]) for name in WIDENED if name in given})
