"""Choose a kernel's configuration and blocks; compile or interpret it, and call it.

`of_...` functions return what a program reads of an operand, None for None.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_attn.integers import quotient
from pallas_attn.lowering import TritonCompilerParams
from pallas_attn.switches import in_32_bits
from pallas_attn.targets import shared_memory
from pallas_attn.varying import unvarying
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.config import padded_head_dim
from twin_attention.targets.family import Backend
from twin_attention.targets.kernels import KernelConfig, Spec
from twin_attention.targets.sm90 import portable_uses_wgmma
from twin_attention.targets.target import SHARED_MEMORY_LIMIT

Place = Callable[[Any], tuple[Any, ...]]  # a program's place in the grid, from its number


def flash_arguments(spec: AttentionSpec, interpreted: bool = False) -> dict[str, Any]:
    """Return the arguments that describe a problem; in Pallas's interpreter products are IEEE."""
    rule = spec.scores
    return {
        "seq_q": spec.seq_q,
        "seq_kv": spec.seq_kv,
        "rule": rule._replace(precision="ieee") if interpreted else rule,
        "window": spec.bounded_window,
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
    }


# What a program reads along an axis: all of it, or all columns, padded to a power of two.
ALL, COLUMNS = "all", "columns"


def block_spec(
    x: Any, place: Callable[..., Mapping[str, Any]], *axes: str | tuple[str, int]
) -> pl.BlockSpec | None:
    """Return what a program reads of `x`, None for None.

    Args:
        place: returns a program's numbers, such as its head's, from its place in the grid.
        axes: what it reads along each axis: ALL, COLUMNS, the one index with the number of this
            name, or a block of that many, starting at that multiple. `x` may have fewer.
    """
    if x is None:
        return None
    axes = axes[: len(x.shape)]

    def size_of(axis, size):
        if axis in (ALL, COLUMNS):
            return size if axis == ALL else padded_head_dim(size)
        return axis[1] if isinstance(axis, tuple) else None

    def index(*program):
        numbers = place(*program)
        return tuple(numbers.get(x[0] if isinstance(x, tuple) else x, 0) for x in axes)

    return pl.BlockSpec(tuple(map(size_of, axes, x.shape)), index)


def _in_grid(tile: Any, head: Any, batch: Any) -> dict[str, Any]:
    return {"head": head, "batch": batch}


def of_head(x: Any, group_size: int = 1) -> pl.BlockSpec | None:
    """Read one head's rows: [B, S, H, D] gives [S, D], D padded to a power of two; [B, H, S] gives
    [S]; [H] gives [].

    `group_size` heads of the grid share one head of `x`.
    """

    def place(tile, head, batch):
        return {"head": quotient(head, group_size) if len(x.shape) == 4 else head, "batch": batch}

    axes = {1: ("head",), 3: ("batch", "head", ALL), 4: ("batch", ALL, "head", COLUMNS)}
    return None if x is None else block_spec(x, place, *axes[len(x.shape)])


def of_all(x: Any) -> pl.BlockSpec | None:
    return block_spec(x, _in_grid, *(ALL,) * 4)


def of_batch(x: Any) -> pl.BlockSpec | None:
    """Read a sequence: [B, ...] gives [...]."""
    return block_spec(x, _in_grid, "batch", *(ALL,) * 3)


def of_lists(x: Any, num_lists: int) -> pl.BlockSpec | None:
    """Read lists of tiles: [B or 1, H or 1, ...] gives [num_lists, ...], a program's own.

    `num_lists` is heads of `x` per head of the grid, 1 if all share them.
    """
    if x is None:
        return None
    batch, head = ("batch" if x.shape[0] > 1 else "first"), ("head" if x.shape[1] > 1 else "first")
    return block_spec(x, _in_grid, batch, (head, num_lists), ALL, ALL)


def of_mask(mask: Any, num_lists: int = 1) -> Any:
    offsets, segments, lists, *tree, intervals = mask
    return mask._make(
        (
            offsets._make(map(of_all, offsets)),
            segments._make(map(of_batch, segments)),
            lists._make(of_lists(x, num_lists) for x in lists),
            *(x._make(map(of_batch, x)) for x in tree),
            intervals._make(map(of_all, intervals)),
        )
    )


def of_terms(terms: Any, group_size: int | None = None) -> Any:
    """Read a head's terms.

    Args:
        terms: relative [Hq, 2R + 1], slopes [Hq], [B, Hq], or [1, Hq, N], seed [2], bias, as
            `of_pairs` takes it, and rest2 [B, Hq, S].
        group_size: query heads of the grid's kv head; None if the grid has query heads.
    """
    head = "head" if group_size is None else ("head", group_size)
    slopes, axes = terms.slopes, {1: (head,), 2: ("batch", head), 3: ("batch", head, ALL)}
    return terms._replace(
        rest2=of_head(terms.rest2) if group_size is None else of_group(terms.rest2, group_size),
        relative=block_spec(terms.relative, _in_grid, head, ALL),
        slopes=None if slopes is None else block_spec(slopes, _in_grid, *axes[slopes.ndim]),
        seed=of_all(terms.seed),
        bias=of_pairs(terms.bias, group_size),
    )


def of_pairs(x: Any, group_size: int | None = None) -> pl.BlockSpec | None:
    """Read a value of each pair: [B, Hq, Sq, Skv], or 1 in place of any, gives [Sq, Skv], or with
    `group_size` as in `of_terms` [group_size or 1, Sq, Skv].
    """
    if x is None:
        return None
    batch, head = ("batch" if x.shape[0] > 1 else "first"), ("head" if x.shape[1] > 1 else "first")
    heads = head if group_size is None else (head, group_size if x.shape[1] > 1 else 1)
    return block_spec(x, _in_grid, batch, heads, ALL, ALL)


def of_group(x: Any, group_size: int) -> pl.BlockSpec | None:
    """Read the rows of the grid's kv head's `group_size` query heads: [B, S, H, D] gives [S,
    group_size, D], [B, H, S] gives [group_size, S].
    """
    if x is None:
        return None
    heads = "head", group_size
    axes = {3: ("batch", heads, ALL), 4: ("batch", ALL, heads, COLUMNS)}
    return block_spec(x, _in_grid, *axes[len(x.shape)])


def _of_program(spec: pl.BlockSpec, place: Place) -> pl.BlockSpec:
    """Turn a `BlockSpec` indexed by grid position into one by a program's number."""
    index_map = spec.index_map
    assert index_map is not None
    return pl.BlockSpec(spec.block_shape, lambda program: index_map(*place(program)))


def launch(
    name: str,
    kernel: Callable[..., None],
    grid: Callable[[KernelConfig], tuple[int, ...]],
    operands: Sequence[Any],
    in_specs: Sequence[Any],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    out_specs: Sequence[pl.BlockSpec | None],
    problem: dict[str, Any],
    spec: Spec,
    backend: Backend,
    aliases: dict[int, int] | None = None,
    order: Callable[[tuple[int, ...], KernelConfig], Place] | None = None,
    numbers: Mapping[str, int] | None = None,
) -> Any:
    """Call a kernel and return the outputs.

    Args:
        name: of the kernel in the configuration tables.
        kernel: the function over references.
        grid: programs to launch, from the configuration.
        operands, in_specs: inputs, None or (tuples of) arrays, and what a program sees of each;
            out_shape and out_specs likewise.
        problem: the kernel's keyword arguments except the tile sizes.
        aliases: inputs, by position, and the positions of the outputs that take their memory.
        order: takes grid and configuration, and returns the kernel's `place`, from a program's
            number to its position in the grid.
        numbers: the compiler's numbers that replace the configuration's.
    """
    config, target = config_of(name, spec, backend), backend.target
    if numbers is not None:
        config = replace(config, **numbers)
    if target == "sm90" and not portable_uses_wgmma(name, spec):
        target = "sm80"
    takes = inspect.signature(kernel).parameters
    arguments = problem | {key: value for key, value in vars(config).items() if key in takes}
    sizes = grid(config)
    if order is not None:
        place = order(sizes, config)
        of_program = functools.partial(_of_program, place=place)
        in_specs, out_specs = jax.tree.map(of_program, (in_specs, out_specs))
        arguments["place"], sizes = place, (math.prod(sizes),)
    return pl.pallas_call(
        in_32_bits(functools.partial(kernel, **arguments)),
        grid=sizes,
        in_specs=in_specs,
        out_shape=unvarying(out_shape),
        out_specs=out_specs,
        compiler_params=None if target is None else TritonCompilerParams(config, target),
        input_output_aliases=aliases or {},
        interpret=backend.interpreted,
        name=name,
    )(*operands)


def config_of(name: str, spec: Spec, backend: Backend) -> Any:
    config, target = backend.configs(spec)[name], backend.target
    if target is None or shared_memory(target) >= SHARED_MEMORY_LIMIT[target]:
        return config
    return backend.config_of_smaller_cards(spec, name, config)
