"""The steps of dk's kernel, for head sizes above 128; `flash_bwd_large` runs them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from torch_attn.kernels.explicit.barriers import DO_READ, Q_READ, READERS, arrive, wait_for_step
from torch_attn.kernels.explicit.registers import pack, unpack
from torch_attn.kernels.explicit.terms import drop_scaled
from torch_attn.kernels.explicit.tma import num_pieces, read_row
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
    """Return packed dsᵀ of the first tile of queries, which has no dsᵀ·q to overlap with."""
    k_tile, v_tile, q_tile, do_tile, _lse2_row, _delta_row, _bias_tile, _rest2_row = kernel.tiles
    k_full, v_full, _kv_read, q_full, do_full = kernel.barriers
    layout: gl.constexpr = product_layout(q_tile[0].shape[3])
    mbarrier.wait(k_full.index(0), turn & 1)
    wait_for_step(q_full, step)
    clear_queries(kernel, keys, q_tile, q_full, step, 0)
    clear_queries(kernel, keys, do_tile, do_full, step, 0)
    clear_keys(kernel, keys, k_tile, CONSUMER, k_full.index(0), turn & 1)
    clear_keys(kernel, keys, v_tile, CONSUMER, v_full.index(0), turn & 1)
    slot_q, slot = step % q_tile[0].shape[0], step % do_tile[0].shape[0]
    s = product_scores(k_tile, CONSUMER, q_tile, slot_q, kernel.head_dim, layout)
    mbarrier.wait(v_full.index(0), turn & 1)
    wait_for_step(do_full, step)
    dp = product_scores(v_tile, CONSUMER, do_tile, slot, kernel.head_dim_v, layout)
    s = warpgroup_mma_wait(num_pieces(kernel.head_dim_v), deps=(s,))
    power, dcap, of_tile = exponents_of_step(kernel, keys, s, step, 0, kernel.edges)
    p = gl.exp2(power)
    p = p * dcap
    dp = warpgroup_mma_wait(0, deps=(dp,))
    return _pack_ds(kernel, p, dp, of_tile, slot, "first")


@gluon.jit
def visit(kernel, keys, index, step, ds, dk, MASKED: gl.constexpr, CONSUMER: gl.constexpr):
    """Compute packed dsᵀ of a tile of queries while dsᵀ·q of the previous one runs; return it and
    dk.

    index, step: the tile's, in the item, and over all items.
    """
    k_tile, v_tile, q_tile, do_tile, _lse2_row, _delta_row, _bias_tile, _rest2_row = kernel.tiles
    _k_full, _v_full, _kv_read, q_full, do_full = kernel.barriers
    Q_STAGES: gl.constexpr = q_tile[0].shape[0]
    layout: gl.constexpr = product_layout(q_tile[0].shape[3])
    if MASKED:
        clear_queries(kernel, keys, q_tile, q_full, step - index, index)
        clear_queries(kernel, keys, do_tile, do_full, step - index, index)
    slot_q, slot = step % Q_STAGES, step % do_tile[0].shape[0]
    previous = (step - 1) % Q_STAGES
    # 0, unknown to the compiler: else it hoists the descriptors of k and v, beyond the registers.
    fresh = step >> 30
    # dk += dsᵀ q for the previous tile, and sᵀ = scale · k qᵀ
    left = unpack(ds, q_tile[0].dtype, layout, "loop")
    dk = add_product(dk, left, q_tile, previous)
    wait_for_step(q_full, step)
    s = product_scores(k_tile, CONSUMER + fresh, q_tile, slot_q, kernel.head_dim, layout)
    dk, left = wait_product(dk, left, num_pieces(kernel.head_dim))
    arrive(Q_READ + previous, READERS)
    # dpᵀ = v doutᵀ
    wait_for_step(do_full, step)
    dp = product_scores(v_tile, CONSUMER + fresh, do_tile, slot, kernel.head_dim_v, layout)
    # pᵀ = exp(sᵀ - lse)
    s = warpgroup_mma_wait(num_pieces(kernel.head_dim_v), deps=(s,))
    power, dcap, of_tile = exponents_of_step(kernel, keys, s, step, index, MASKED)
    p = gl.exp2(power)
    p = p * dcap
    # Passes at once: its branch keeps ptxas from hoisting the next wait.
    wait_for_step(do_full, step)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    return _pack_ds(kernel, p, dp, of_tile, slot, "edge" if MASKED else "full"), dk


@gluon.jit
def _pack_ds(kernel, p, dp, of_tile, slot, PLACE: gl.constexpr):
    """Return packed ``dsᵀ = pᵀ ∘ (dpᵀ - delta)``; p includes the derivative of the cap."""
    layout: gl.constexpr = product_layout(kernel.tiles.q[0].shape[3])
    delta = read_row(kernel.tiles.delta, slot, layout)
    dp = drop_scaled(dp, kernel.terms, of_tile, True)
    ds = pack(p * (dp - delta[None, :]), kernel.tiles.q[0].dtype)
    if len(kernel.results[2]) > 0:
        hand_over(kernel.results[2], ds, (), PLACE)
    arrive(DO_READ + slot, READERS)
    return ds


@gluon.jit
def add_last(kernel, ds, dk, step):
    q_tile = kernel.tiles.q
    previous = (step - 1) % q_tile[0].shape[0]
    left = unpack(ds, q_tile[0].dtype, product_layout(q_tile[0].shape[3]), "end")
    dk = add_product(dk, left, q_tile, previous)
    dk, left = wait_product(dk, left)
    arrive(Q_READ + previous, READERS)
    return dk
