"""Products of mma.sync, from tiles in shared memory and in registers."""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.cp_async import block_columns, padded_columns
from pallas_attn.kernels.explicit.registers import Layout
from pallas_attn.private import mgpu

CHUNK = 16  # rows of v that a product takes at a time: more would take the sums' registers


def zeros(rows, columns, dtype, m_warps=4):
    """Return an accumulator that is 0; m_warps of a warpgroup's warps have rows of their own."""
    zero = jnp.zeros((rows, columns), jnp.float32)
    return plgpu.layout_cast(zero, plgpu.Layout.MMA_ACC(dtype, m_warps=m_warps))


def load_left(tile, m_warps=4):
    return plgpu.load(tile, layout=plgpu.Layout.MMA_LHS(tile.dtype, m_warps=m_warps))


def load_right(tile, m_warps=4):
    return plgpu.load(tile, layout=plgpu.Layout.MMA_RHS(tile.dtype, m_warps=m_warps))


def product_scores(a, b, size, m_warps=4):
    """Return a · bᵀ, `block_columns(size)` columns at a time; `a` may be in registers."""
    s = zeros(a.shape[0], b.shape[0], b.dtype, m_warps)
    if isinstance(a, Array):
        return plgpu.mma(s, a, load_right(b.T))
    for start in range(0, padded_columns(size), block_columns(size)):
        columns = pl.ds(start, block_columns(size))
        left, right = load_left(a.at[:, columns], m_warps), load_right(b.at[:, columns].T, m_warps)
        s = plgpu.mma(s, left, right)
    return s


def add_product(acc, p, b):
    p = p.astype(b.dtype)
    for start in range(0, b.shape[0], CHUNK):
        left = as_left_operand(p[:, start : start + CHUNK])
        acc = plgpu.mma(acc, left, load_right(b.at[pl.ds(start, CHUNK)]))
    return acc


def add_product_shared(acc, a, b):
    """Return acc + a · b from shared memory, a in blocks of CHUNK; two warps share rows of acc."""
    return add_chunks(acc, (load_left(x, 2) for x in chunks(a)), b)


def chunks(a):
    return [a.at[:, pl.ds(start, CHUNK)] for start in range(0, a.shape[1], CHUNK)]


def add_chunks(acc, left, b):
    """Return acc + a · b, where `left` is the `chunks` of a in registers."""
    for i, chunk in enumerate(left):
        acc = plgpu.mma(acc, chunk, load_right(b.at[pl.ds(i * CHUNK, CHUNK)], 2))
    return acc


# Can go when `layout_cast` takes MMA_ACC to MMA_LHS.
def as_left_operand(p):
    """Return p, an accumulator, as a left operand; this takes no instruction."""
    dtype = p.dtype
    left = Layout.MMA_LHS(dtype)

    @plgpu.inline_mgpu(
        arg_types=(Layout.MMA_ACC(dtype),), return_type=plgpu.ShapeDtypeStruct(p.shape, dtype, left)
    )
    def rename(_, x):
        row_tiles, column_tiles = x.registers.shape[:2]
        registers = x.registers.reshape(row_tiles, column_tiles // 2, 2, 2)
        layout = left.to_mgpu()
        registers = np.ascontiguousarray(registers).reshape(layout.registers_shape(p.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return rename(p)
