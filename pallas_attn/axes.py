"""Which axes of an operation's arrays are its batch and its heads, and how devices divide these.

An array's axes are a string with a letter for each: "b" is the batch, "h" the query heads, "g" the
kv heads, "." another axis and "s" that of dropout's seed, which are never divided. A capital is an
axis of size 1, which a mesh axis of one device may divide. "0", "1", ... are axes that `vmap` maps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from jax.sharding import PartitionSpec

from twin_attention.contract.operands import (
    AppendOperands,
    BlockSparseOperands,
    DecodeOperands,
    FlashOperands,
    PagedOperands,
    VarlenOperands,
)
from twin_attention.contract.paged_spec import AppendSpec, DecodeSpec
from twin_attention.contract.spec import AttentionSpec, BlockSparseSpec, MergeSpec
from twin_attention.targets.kernels import Spec

# Of each operand; one with fewer axes has the last ones.
_OPERANDS = {
    FlashOperands: FlashOperands(
        "b.h.", "b.g.", "b.g.", "h", "b.", "b.", "b.", "b.", "b.", "b...", "bh..", "h.", "bh", "s"
    ),
    VarlenOperands: VarlenOperands(
        ".h.", ".g.", ".g.", ".", ".", "h", ".", ".", ".", "...", "h.", ".h", "s"
    ),
    BlockSparseOperands: BlockSparseOperands(
        "b.h.", "b.g.", "b.g.", "bh.", "bh..", "bh.", "bh..", "h"
    ),
    DecodeOperands: DecodeOperands("b.h.", "..g.", "..g.", "b.", "b", "h", "g", "g", "b.", "bh"),
    PagedOperands: PagedOperands(
        ".h.", "..g.", "..g.", "..", ".", ".", "h", "g", "g", ".", ".h", "..."
    ),
    AppendOperands: AppendOperands(
        "..g.", "..g.", "..g.", "..g.", "..", ".", "g", "g", ".", "..h.", "..", ".."
    ),
}
Division = Mapping[str, tuple[str, ...]]  # the mesh axes that divide a letter's axes


def axes_of(operation: str, args: tuple[Any, ...]) -> tuple[list[str], list[str]] | None:
    """Return the axes of an operation's arguments and results; None if it is not divided."""
    if operation == "combine":
        return [".b.h.", ".bh."], ["b.h.", "bh."]
    # Tangents come before the operands, and lack some.
    operands = next((x for x in reversed(args) if type(x) in _OPERANDS), None)
    if operands is None:
        return None
    of = _OPERANDS[type(operands)]
    own = of._make(
        names if x is None else _own(names, x.shape) for names, x in zip(of, operands, strict=True)
    )
    if operation == "append_kv":
        return [*own], [own.k_pages, own.v_pages, own.q]
    rows = "h." if len(own.q) == 3 else "bh."
    if operation == "flash_bwd":
        return [own.q, rows, *own, own.q, rows, rows], [*own]
    if operation == "flash_jvp":
        return [*own, *own, own.q, rows, rows], [own.q, rows]
    return [*own], [own.q, rows, rows, rows]


def _own(axes: str, shape: tuple[int, ...]) -> str:
    pairs = zip(axes[len(axes) - len(shape) :], shape, strict=True)
    return "".join(letter.upper() if size == 1 else letter for letter, size in pairs)


def divide(
    axes: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    specs: Sequence[Any],
    mesh: Mapping[str, int],
    spec: Spec,
) -> Division:
    """Return how devices divide an operation; the first array divided along a letter decides.

    A capital has the mesh axes of its letter if these have one device.
    """
    found: dict[str, tuple[str, ...]] = {}
    for names, shape, parts in zip(axes, shapes, specs, strict=True):
        for letter, size, part in zip(names, shape, (*parts, *[None] * len(shape)), strict=False):
            has_one, letter = letter.isupper(), letter.lower().replace("g", "h")
            if letter in ".s" or part is None or letter in found:
                continue
            own = part if isinstance(part, tuple) else (part,)
            own = tuple(x for x in own if not any(x in other for other in found.values()))
            if has_one and prod(mesh[x] for x in own) > 1:
                continue
            sizes = _heads(spec) if letter == "h" else (size, size)
            while own and not _divides(prod(mesh[x] for x in own), sizes, spec):
                own = own[:-1]
            found[letter] = own
    found = {letter: own for letter, own in found.items() if own}
    if "h" in found and _heads(spec)[1] % prod(mesh[x] for x in found["h"]) == 0:
        found["g"] = found["h"]
    ones = {x.upper(): own for x, own in found.items() if prod(mesh[y] for y in own) == 1}
    return found | ones


def _heads(spec: Spec) -> tuple[int, int]:
    if isinstance(spec, MergeSpec):
        return spec.heads, spec.heads
    if isinstance(spec, AppendSpec):
        return spec.heads_q or spec.cache.heads, spec.cache.heads
    return spec.heads_q, spec.heads_kv


def _divides(number: int, sizes: tuple[int, int], spec: Spec) -> bool:
    """Return True if `number` devices can share so many query and kv heads.

    One kv head may serve several devices, but not of a pool, which each would have to slice.
    """
    shares = isinstance(spec, AttentionSpec) and sizes[1] > 0 and number % sizes[1] == 0
    return sizes[0] % number == 0 and (sizes[1] % number == 0 or shares)


def partition(axes: str, division: Division) -> PartitionSpec:
    return PartitionSpec(*(division.get(letter) for letter in axes))


def of_device(spec: Spec, division: Division, mesh: Mapping[str, int]) -> Spec:
    def part(letter: str, size: int) -> int:
        return max(1, size // prod(mesh[x] for x in division.get(letter, ())))

    if isinstance(spec, MergeSpec):
        return replace(spec, batch=part("b", spec.batch), heads=part("h", spec.heads))
    if isinstance(spec, (DecodeSpec, AppendSpec)):
        cache = replace(spec.cache, heads=part("g", spec.cache.heads))
        heads = part("h", spec.heads_q) if spec.heads_q else 0
        return replace(spec, batch=part("b", spec.batch), heads_q=heads, cache=cache)
    assert isinstance(spec, AttentionSpec)
    masks = {}
    if isinstance(spec, BlockSparseSpec):
        masks = {"mask_batch": part("b", spec.mask_batch), "mask_heads": part("h", spec.mask_heads)}
    heads_kv = 1 if shares_kv_heads(division) else part("g", spec.heads_kv)
    return replace(
        spec, batch=part("b", spec.batch), heads_q=part("h", spec.heads_q), heads_kv=heads_kv,
        **masks,
    )  # fmt: skip


def shares_kv_heads(division: Division) -> bool:
    """Return True if each device needs one kv head, and several need the same."""
    return "h" in division and "g" not in division
