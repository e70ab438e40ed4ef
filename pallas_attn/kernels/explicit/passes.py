"""The passes over rows before and after the kernels of a backward, for SM80 and SM90."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.addresses import pointer_to
from pallas_attn.kernels.explicit.barriers import warpgroup_barrier
from pallas_attn.kernels.explicit.cp_async import (
    allocate_tile,
    fills_tiles,
    store_rows,
    tile_transforms,
)
from pallas_attn.kernels.explicit.lowering import AliasingParams, compiler_params
from pallas_attn.kernels.explicit.registers import SCALAR, THREADS
from pallas_attn.kernels.explicit.rows import dot_loaded_rows, load_row_values, store_row_values
from pallas_attn.kernels.explicit.sequences import locate_tile
from pallas_attn.kernels.gradients import Sources
from pallas_attn.kernels.library.sequences import count_sequence_tiles
from pallas_attn.kernels.library.softmax import lse_to_subtract
from pallas_attn.kernels.library.tiles import ROW_PADDING
from pallas_attn.private import arith, ir, llvm, mgpu, mgpu_utils
from pallas_attn.switches import in_32_bits
from pallas_attn.varying import unvarying

ROWS = 64  # rows of a program, which is one warpgroup
OF_ROW = plgpu.Layout.WGMMA.reduce(1)


class Sums(NamedTuple):
    """Say how a family adds up gradients; read: reads rows of sums in the order of additions."""

    params: type[AliasingParams]
    columns: Callable[[int], int]
    read: Callable[..., Any]


class Rows(NamedTuple):
    """The rows of a program.

    padded: the first row in lse2, delta and the sums, where each sequence begins a tile of
        ROW_PADDING rows.
    is_token: the sequence is not padding.
    """

    batch: Any
    head: Any
    padded: Any
    start: Any
    end: Any
    is_token: Any


def locate_rows(cu_seqlens_ref, num_rows, heads):
    """Return the rows of this program; the heads of the same rows follow each other."""
    program = lax.axis_index("program")
    head, tile = program % heads, program // heads
    num_tiles = count_tiles(cu_seqlens_ref, num_rows)
    batch, tile = tile // num_tiles, tile % num_tiles
    padded = tile * ROWS
    # With the same rows as the other axis, the sequence of padding is empty.
    _sequence, _first, start, end, _first_other, size = locate_tile(
        cu_seqlens_ref, cu_seqlens_ref, padded // ROW_PADDING, num_rows, num_rows, ROW_PADDING
    )
    return Rows(batch, head, padded, start + padded % ROW_PADDING, end, size > 0)


def count_tiles(cu_seqlens, num_rows):
    num_sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    tiles = count_sequence_tiles(num_rows, num_sequences, ROW_PADDING)
    return tiles * (ROW_PADDING // ROWS)


def flash_bwd_preprocess_kernel(sources, cu_seqlens_ref, lse2_ref, delta_ref, dq_sum_ref=None):
    """One program prepares ROWS rows of a head, as the portable `flash_bwd_preprocess_kernel`.

    lse2, delta and the sums of dq, which become 0, have rows as in `Rows`. Grid: (rows · batch ·
    heads).
    """
    seq, heads = sources.dout.shape[1:3]
    rows = locate_rows(cu_seqlens_ref, seq, heads)
    all_exist = cu_seqlens_ref is None and fills_tiles(seq, ROW_PADDING)
    place, padded = (rows.batch, rows.head, rows.start), (rows.batch, rows.head, rows.padded)

    def store(lse2, delta):
        store_row_values(lse2, lse2_ref, *padded, None, OF_ROW)
        store_row_values(delta, delta_ref, *padded, None, OF_ROW)

    def prepare():
        num_rows = None if all_exist else rows.end
        lse = load_row_values(sources.lse, *place, num_rows, float("inf"))
        delta = dot_loaded_rows(sources.dout, sources.out, *place, num_rows)
        if cu_seqlens_ref is not None:
            delta = jnp.where(rows.is_token, delta, 0.0)
        if sources.dlse is not None:
            dlse = load_row_values(sources.dlse, *place, num_rows, 0.0)
            delta = delta - jnp.where(lse == float("-inf"), 0.0, dlse)
        store(lse_to_subtract(lse), delta)

    if all_exist:
        prepare()
    else:
        pl.when(rows.start < rows.end)(prepare)

        @pl.when(rows.start >= rows.end)
        def _():
            store(*(plgpu.layout_cast(jnp.full((ROWS,), x), OF_ROW) for x in (jnp.inf, 0.0)))

    if dq_sum_ref is not None:
        clear_sums(dq_sum_ref, *padded)


def clear_sums(sums, batch, head, start):
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[SCALAR] * 3))
    def clear(_, sums, batch, head, start):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        thread = arith.remui(mgpu_utils.thread_idx(), mgpu.c(THREADS, i32))
        base = pointer_to(sums, batch, head, start)
        base = mgpu_utils.getelementptr(base, [arith.muli(thread, mgpu.c(4, i32))], f32)
        unit = ir.VectorType.get((4,), i32)
        zeros = mgpu_utils.bitcast(mgpu.c(0, ir.IntegerType.get_signless(128)), unit)
        for first in range(0, ROWS * ir.MemRefType(sums.type).shape[3], 4 * THREADS):
            llvm.store(zeros, mgpu_utils.getelementptr(base, [first], f32))

    clear(sums, batch, head, start)


def flash_bwd_postprocess_kernel(sums_ref, cu_seqlens_ref, gradient_ref, tile, *, read, scale):
    """One program scales ROWS rows of a head's float32 sums, and stores them as a gradient."""
    seq, heads = gradient_ref.shape[1:3]
    rows = locate_rows(cu_seqlens_ref, seq, heads)
    all_exist = cu_seqlens_ref is None and fills_tiles(seq, ROW_PADDING)

    def finish():
        sums = read(sums_ref, rows.batch, rows.head, rows.padded, tile.shape)
        tile[...] = (sums * scale).astype(tile.dtype)
        warpgroup_barrier()
        place = rows.batch, rows.head, rows.start, None if all_exist else rows.end
        store_rows(tile, tile_transforms(gradient_ref.shape[3]), gradient_ref, *place)

    if all_exist:
        finish()
    else:
        pl.when(rows.start < rows.end)(finish)


def preprocess(
    rows: Sources, cu_seqlens: Array | None, sums: Sums, has_sums: bool
) -> tuple[Array, Array, Array | None]:
    """Return lse2, delta, and the sums of dq, which are 0, or None."""
    batch, seq, heads, _ = rows.dout.shape
    num_tiles = count_tiles(cu_seqlens, seq)
    shape = batch, heads, num_tiles * ROWS
    outputs = [jax.ShapeDtypeStruct(shape, jnp.float32)] * 2
    if has_sums:
        columns = sums.columns(rows.q.shape[3])
        outputs.append(jax.ShapeDtypeStruct((*shape, columns), jnp.float32))
    operands = rows._replace(q=None, k=None, v=None)
    lse2, delta, *dq_sum = _launch(
        "flash_bwd_preprocess", flash_bwd_preprocess_kernel, num_tiles * batch * heads,
        (operands, cu_seqlens), outputs, None, sums.params,
    )  # fmt: skip
    return lse2, delta, dq_sum[0] if has_sums else None


def postprocess(
    gradient_sums: Array,
    like: Array,
    sums: Sums,
    scale: float = 1.0,
    cu_seqlens: Array | None = None,
) -> Array:
    batch, seq, heads, head_dim = like.shape
    num_tiles = count_tiles(cu_seqlens, seq)
    (gradient,) = _launch(
        "flash_bwd_postprocess",
        functools.partial(flash_bwd_postprocess_kernel, read=sums.read, scale=scale),
        num_tiles * batch * heads,
        (gradient_sums, cu_seqlens),
        [jax.ShapeDtypeStruct(like.shape, like.dtype)],
        allocate_tile(like.dtype, 1, ROWS, head_dim),
        sums.params,
    )
    return gradient


def _launch(name, kernel, programs, operands, outputs, tile, params):
    inputs, places = jax.tree.flatten(operands)

    def body(*refs):
        others = refs[len(inputs) : len(inputs) + len(outputs)]
        tiles = (x.at[0] for x in refs[len(inputs) + len(outputs) :])
        kernel(*places.unflatten(refs[: len(inputs)]), *others, *tiles)

    call = plgpu.kernel(
        in_32_bits(body),
        out_type=unvarying(tuple(outputs)),
        scratch_types=() if tile is None else (tile,),
        grid=(programs,),
        grid_names=("program",),
        kernel_name=name,
        compiler_params=compiler_params(params),
    )
    return call(*inputs)
