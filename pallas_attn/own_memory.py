"""Lower a kernel so that what it writes is no part of a larger array."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pallas_attn.private import stablehlo


def lower_with_own_memory(
    rule: Callable[..., Sequence[Any]], ctx: Any, operands: Sequence[Any], written: Iterable[int]
) -> list[Any]:
    """Return the results of a kernel's lowering rule.

    XLA passes a kernel places in larger arrays: of a slice that it takes, and of one that its
    result updates, as in a loop over layers (``DynamicSliceFusionRewriterV2``, on by default in JAX
    0.11.2). Three cases go wrong. An operand that is written belongs to another array, which the
    caller keeps. A result in the memory of an operand is never written where it belongs. And a
    kernel overwrites what it still reads, when both are the same slice of one array. So these have
    memory of their own, and XLA copies a slice. It looks for slices behind no optimization barrier,
    except one of several arrays: each array has its own. Slices that are only read stay in place.

    Args:
        rule: gives the results from the context and the operands.
        written: which operands the kernel writes to.
    """
    values = [*operands]
    for i in written:
        values[i] = _barrier(values[i])
    return [_barrier(x) for x in rule(ctx, *values)]


def _barrier(value: Any) -> Any:
    return stablehlo.OptimizationBarrierOp([value]).results[0]
