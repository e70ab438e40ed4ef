"""The steps of dv's kernel, for head sizes above 128; `flash_bwd_large` runs them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from torch_attn.kernels.explicit.barriers import DO_READ, READERS, arrive, wait_for_step
from torch_attn.kernels.explicit.registers import pack, unpack
from torch_attn.kernels.explicit.terms import drop
from torch_attn.kernels.explicit.wgmma import (
    add_product,
    product_layout,
    product_scores,
    wait_product,
)
from torch_attn.kernels.sm90.halves import hand_over
from torch_attn.kernels.sm90.queries import clear_keys, clear_queries, exponents_of_step


@gluon.jit
def visit_first(kernel, keys, step, turn, CONSUMER: gl.constexpr):
    """Return packed pᵀ of the first tile of queries, which has no pᵀ·dout to overlap with."""
    k_full, _v_full, _kv_read, q_full, _do_full = kernel.barriers
    k_tile, q_tile = kernel.tiles.k, kernel.tiles.q
    layout: gl.constexpr = product_layout(q_tile[0].shape[3])
    mbarrier.wait(k_full.index(0), turn & 1)
    wait_for_step(q_full, step)
    clear_queries(kernel, keys, q_tile, q_full, step, 0)
    clear_keys(kernel, keys, k_tile, CONSUMER, k_full.index(0), turn & 1)
    slot = step % q_tile[0].shape[0]
    s = product_scores(k_tile, CONSUMER, q_tile, slot, kernel.head_dim, layout)
    s = warpgroup_mma_wait(0, deps=(s,))
    power, _dcap, of_tile = exponents_of_step(kernel, keys, s, step, 0, kernel.edges)
    p = gl.exp2(power)
    packed = pack(drop(p, kernel.terms, of_tile.kept, True), q_tile[0].dtype)
    if len(kernel.results[2]) > 0:
        _hand_over(kernel, keys, packed, step, 0, kernel.edges, "first")
    return packed


@gluon.jit
def visit(kernel, keys, index, step, packed, dv, MASKED: gl.constexpr, CONSUMER: gl.constexpr):
    """Compute packed pᵀ of a tile of queries while pᵀ·dout of the previous one runs; return it and
    dv.

    index, step: the tile's, in the item, and over all items.
    """
    _k_full, _v_full, _kv_read, q_full, do_full = kernel.barriers
    k_tile, q_tile, do_tile = kernel.tiles.k, kernel.tiles.q, kernel.tiles.dout
    dtype: gl.constexpr = q_tile[0].dtype
    layout: gl.constexpr = product_layout(q_tile[0].shape[3])
    if MASKED:
        # dout's next tile may take this one's place: it does not arrive before.
        clear_queries(kernel, keys, q_tile, q_full, step - index, index)
        if len(kernel.results[2]) == 0:
            clear_queries(kernel, keys, do_tile, do_full, step - index, index - 1)
    slot, previous = step % q_tile[0].shape[0], (step - 1) % do_tile[0].shape[0]
    # sᵀ = scale · k qᵀ, and dv += pᵀ dout for the previous tile
    wait_for_step(q_full, step)
    s = product_scores(k_tile, CONSUMER, q_tile, slot, kernel.head_dim, layout)
    wait_for_step(do_full, step - 1)
    left = unpack(packed, dtype, layout, "edge" if MASKED else "full")
    dv = add_product(dv, left, do_tile, previous)
    s = warpgroup_mma_wait(len(dv), deps=(s,))
    # pᵀ = exp(sᵀ - lse)
    power, _dcap, of_tile = exponents_of_step(kernel, keys, s, step, index, MASKED)
    p = gl.exp2(power)
    # Passes at once: its branch keeps ptxas from hoisting the next wait.
    wait_for_step(do_full, step - 1)
    dv, left = wait_product(dv, left)
    arrive(DO_READ + previous, READERS)
    packed = pack(drop(p, kernel.terms, of_tile.kept, True), dtype)
    if len(kernel.results[2]) > 0:
        place: gl.constexpr = "edge, given" if MASKED else "full, given"
        _hand_over(kernel, keys, packed, step, index, MASKED, place)
    return packed, dv


@gluon.jit
def _hand_over(kernel, keys, packed, step, index, MASKED: gl.constexpr, PLACE: gl.constexpr):
    """Give the other consumer pᵀ, and a tile of dout that has no rows of others."""
    if MASKED:
        clear_queries(kernel, keys, kernel.tiles.dout, kernel.barriers.do_full, step - index, index)
    hand_over(kernel.results[2], packed, (), PLACE)


@gluon.jit
def add_last(kernel, packed, dv, step):
    do_tile = kernel.tiles.dout
    previous = (step - 1) % do_tile[0].shape[0]
    wait_for_step(kernel.barriers.do_full, step - 1)
    layout: gl.constexpr = product_layout(kernel.tiles.q[0].shape[3])
    left = unpack(packed, do_tile[0].dtype, layout, "end")
    dv = add_product(dv, left, do_tile, previous)
    dv, left = wait_product(dv, left)
    arrive(DO_READ + previous, READERS)
    return dv
