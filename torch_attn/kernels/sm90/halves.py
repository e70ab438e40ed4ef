"""Results of more than 256 columns: one consumer has the first ones, another the rest.

An accumulator of all columns would not fit a warpgroup's registers. The first consumer computes the
scores and hands p (or ds) over in shared memory, with the factor of what was accumulated before.
"""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from torch_attn.kernels.explicit.barriers import (
    P_READ,
    P_WRITTEN,
    arrive,
    wait_for_all,
    wait_for_step,
)
from torch_attn.kernels.explicit.registers import unpack
from torch_attn.kernels.explicit.tma import box_layout, reinterpret
from torch_attn.kernels.explicit.wgmma import add_shared, product_layout, rescale, wait_sums
from twin_attention.targets import sm90

first_columns = triton.constexpr_function(sm90.first_columns)


class Halves(NamedTuple):
    """Hold what the first consumer hands over: p of a tile and, in a forward, the rows' factors."""

    p: Any
    factor: Any


@gluon.jit
def allocate_halves(DTYPE: gl.constexpr, COLUMNS: gl.constexpr):
    p = gl.allocate_shared_memory(DTYPE, [64, COLUMNS], box_layout(COLUMNS, rank=2))
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Halves(p, gl.allocate_shared_memory(gl.float32, [64], layout))


@gluon.jit
def halves_in(tile, COLUMNS: gl.constexpr):
    """Return a `Halves` without factors in the memory of a single tile, multiplied before."""
    COUNT: gl.constexpr = tile[0].shape[3] * tile[0].shape[4] // (64 * COLUMNS)
    layout: gl.constexpr = box_layout(COLUMNS, rank=2)
    p = reinterpret(tile[0].index(0), tile[0].dtype, [COUNT, 64, COLUMNS], layout)
    return Halves(p.index(0), ())


@gluon.jit
def hand_over(halves, packed, factors, PLACE: gl.constexpr):
    """Give the other consumer packed p, once it has used the last one; factors: (), or one."""
    LAYOUT: gl.constexpr = product_layout(halves.p.shape[1])
    p = unpack(packed, halves.p.dtype, LAYOUT, PLACE)
    wait_for_all(P_READ, 256)
    halves.p.store(gl.convert_layout(p, LAYOUT, assert_trivial=True))
    for i in gl.static_range(len(factors)):
        halves.factor.store(factors[i])
    fence_async_shared()
    arrive(P_WRITTEN, 256)


@gluon.jit
def hand_over_factor(halves, factor):
    """Give the other consumer the factor of its rows' results."""
    wait_for_all(P_READ, 256)
    halves.factor.store(factor)
    arrive(P_WRITTEN, 256)


@gluon.jit
def receive_factor(halves, acc, ON_DEMAND: gl.constexpr):
    """Wait for what the first consumer hands over, and scale what was accumulated."""
    wait_for_all(P_WRITTEN, 256)
    layout: gl.constexpr = gl.SliceLayout(1, product_layout(acc[0].shape[1]))
    return rescale(acc, halves.factor.load(layout), ON_DEMAND)


@gluon.jit
def add_handed(halves, acc, tile, full, step):
    """Add the product of p, which is there, and the other columns of a step's tile."""
    wait_for_step(full, step)
    acc = wait_sums(add_shared(acc, halves.p, tile[1:], step % tile[0].shape[0]), 0)
    arrive(P_READ, 256)
    return acc
