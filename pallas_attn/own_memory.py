"""Lower a kernel so that it never writes into part of a larger array."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pallas_attn.private import stablehlo


def lower_with_own_memory(
    rule: Callable[..., Sequence[Any]], ctx: Any, operands: Sequence[Any], written: Iterable[int]
) -> list[Any]:
    """Return the results of a kernel's lowering rule.

    XLA may pass a kernel addresses inside larger arrays, for a slice that it reads or one that its
    result updates, as in a loop over layers (``DynamicSliceFusionRewriterV2``, on by default in JAX
    0.11.2). Then a written operand may belong to another array, which the caller keeps; a result in
    an operand's memory is never written where it belongs; and a kernel overwrites what it still
    reads, if both are the same slice. So these arrays get their own memory, and XLA copies a slice.
    An optimization barrier hides a slice from XLA, but not one over several arrays, so each array
    has its own. Slices that are only read stay in place.

    `rule` takes the context and the operands; `written` says which operands the kernel writes.
    """
    values = [*operands]
    for i in written:
        values[i] = _barrier(values[i])
    return [_barrier(x) for x in rule(ctx, *values)]


def _barrier(value: Any) -> Any:
    return stablehlo.OptimizationBarrierOp([value]).results[0]
