"""Products of wgmma: their accumulators, and the waits for them."""

import functools

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.private import arith, ir, llvm, mgpu

WGMMA = plgpu.Layout.WGMMA
WGMMA_ROWS = 64  # rows of a product of one warpgroup


def add_scores(s, q, k):
    """Start s += q kᵀ, one group of products a piece; s is an accumulator."""
    for q_piece, k_piece in zip(q.multiplied, k.multiplied, strict=True):
        plgpu.wgmma(s, q_piece, k_piece.T)


def add_values(acc, p, v):
    """Start acc += p v, with p in registers, one group a piece; acc is an accumulator."""
    for piece, columns in zip(v.multiplied, v.columns, strict=True):
        part = acc if len(v.multiplied) == 1 else acc.at[:, columns]
        plgpu.wgmma(part, p, piece)


def accumulator(rows, columns):
    return plgpu.ACC((rows, columns), jnp.float32)


def zeros(rows, columns) -> Array:
    return plgpu.layout_cast(jnp.zeros((rows, columns), jnp.float32), WGMMA)


def columns_of(ref, lower, upper):
    if upper - lower == ref.shape[-1]:
        return ref
    return ref.at[:, pl.ds(lower, upper - lower)]


def wait_for(ref, wait_n, *read):
    """Return an accumulator after all but wait_n products; `read` operands live until then."""
    x = plgpu.wgmma_accumulator_load(ref, wait_n=wait_n)
    return lax.optimization_barrier((x, *read))[0]


# Can go when ptxas does not hoist wgmma's waits.
def finish_before_wait(sums):
    """Keep the next wait for products after the code that computes `sums`, [64, 8], none -inf.

    ptxas hoists the wait above independent work, which then no longer overlaps the products, but
    not above a branch. This branch is never taken.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA,))
    def branch(_, sums):
        places = [mgpu.c(i, ir.IntegerType.get_signless(32)) for i in (0, 1)]
        numbers = [llvm.extractelement(pair, i) for pair in sums.registers.flat for i in places]
        total = functools.reduce(arith.addf, numbers)
        text = "{ .reg .pred q; setp.eq.f32 q, $0, 0fFF800000; @q nanosleep.u32 1; }"
        void = ir.Type.parse("!llvm.void")
        llvm.inline_asm(void, [total], text, "f", has_side_effects=True)

    branch(sums)
