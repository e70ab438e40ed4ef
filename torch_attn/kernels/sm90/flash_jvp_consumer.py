"""A warpgroup that computes the tangents of 64 rows of each work item, for SM90."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from torch_attn.kernels.explicit.barriers import K_READ, READERS, V_READ, arrive, wait_for_step
from torch_attn.kernels.explicit.carry import head_rows, load_carry
from torch_attn.kernels.explicit.hidden import load_keys
from torch_attn.kernels.explicit.items import own_item
from torch_attn.kernels.explicit.softmax import add_columns, online_softmax_update
from torch_attn.kernels.explicit.steps import step_start
from torch_attn.kernels.explicit.terms import adds_terms, drop_scaled
from torch_attn.kernels.explicit.tma import num_pieces, store_result
from torch_attn.kernels.explicit.wgmma import (
    add_product,
    add_scores,
    product_layout,
    product_scores,
    scale_rows,
    wait_products,
    zeros,
)
from torch_attn.kernels.explicit.wgmma_scores import exponents
from torch_attn.kernels.library.softmax import LOG2E, add_sink, load_forward_lse, row_statistics
from torch_attn.kernels.sm90.work import (
    clear_visited,
    first_of_head,
    own_queries,
    shown_scores,
    terms_of_tile,
)


class Results(NamedTuple):
    """Hold a forward's out and lse, if not `given` both are written, and their tangents.

    A given out is a pointer to [B, Sq, Hq, D], contiguous.
    """

    out: Any
    lse: Any
    dout: Any
    dlse: Any
    given: Any = None


@gluon.jit
def consume(kernel, CONSUMER: gl.constexpr):
    """Compute all items' rows; a kernel's sinks_ptr is a pair with their tangents."""
    q_full, dq_full, q_read, _k_full, _dk_full, _v_full, _dv_full = kernel.barriers
    BLOCK_KV: gl.constexpr = kernel.tiles[2][0].shape[3]
    step = 0  # counted over all items
    turn = 0
    item, place = own_item(turn, kernel.problem, kernel.shared, CONSUMER)
    while item < kernel.problem.num_items:
        queries = own_queries(kernel, item, place, CONSUMER, BLOCK_KV)
        sums = add_columns(gl.zeros([64, BLOCK_KV], gl.float32, product_layout(BLOCK_KV)))
        dlse = sums
        weight = gl.full([64], 0.0, gl.float32, queries.rows.type.layout)
        center = weight
        acc = zeros(64, kernel.head_dim)
        if kernel.results.given:
            # In place of the running maxima and sums, lse2 and rest2.
            m_i, l_i = load_forward_lse(
                kernel.results.lse, kernel.terms, first_of_head(kernel, queries), queries.rows,
                queries.rows < queries.work.rows.end,
            )  # fmt: skip
            out = ()
        else:
            m_i, l_i, out = weight + float("-inf"), sums, acc
        mbarrier.wait(q_full.index(CONSUMER), turn & 1)
        mbarrier.wait(dq_full.index(CONSUMER), turn & 1)

        # Visit the tiles of keys that these queries see; only tiles at the edges are masked.
        _begin, before, full, after = queries.work.visits
        index = 0
        for masked in gl.static_range(1 if kernel.edges else 0, -1, -1):
            end = before + after if masked else before + full + after
            while index < end:
                out, acc, m_i, l_i, dlse, weight, center = _visit(
                    kernel, queries, index, step, out, acc, m_i, l_i, dlse, weight, center, masked,
                    CONSUMER,
                )  # fmt: skip
                index += 1
                step += 1

        _finish_rows(kernel, queries, out, acc, m_i, l_i, dlse, center, CONSUMER)
        tma.store_wait(0)
        mbarrier.arrive(q_read.index(CONSUMER), count=1)
        turn += 1
        item, place = own_item(turn, kernel.problem, kernel.shared, CONSUMER)


@gluon.jit
def _visit(
    kernel, queries, index, step, out, acc, m_i, l_i, dlse, weight, center, MASKED: gl.constexpr,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """Add a tile of keys. p is computed while ds is multiplied, and ds while p v is."""
    q_tile, dq_tile, k_tile, dk_tile, v_tile, dv_tile = kernel.tiles
    _q_full, _dq_full, _q_read, k_full, dk_full, v_full, dv_full = kernel.barriers
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    PIECES: gl.constexpr = num_pieces(kernel.head_dim)
    dtype: gl.constexpr = q_tile[0].dtype
    layout: gl.constexpr = product_layout(BLOCK_KV)
    ADDS: gl.constexpr = adds_terms(
        kernel.terms.bias.entries, kernel.terms.relative, kernel.terms.slopes
    )
    scale = kernel.rule.scale
    slot = step % k_tile[0].shape[0]
    _begin, before, _full, after = queries.work.visits
    start = step_start(index, *queries.work.visits, BLOCK_KV)
    # s = scale · q kᵀ, and ds = scale · (dq kᵀ + q dkᵀ)
    wait_for_step(k_full, step)
    s = product_scores(q_tile, CONSUMER, k_tile, slot, kernel.head_dim, layout)
    ds = product_scores(dq_tile, CONSUMER, k_tile, slot, kernel.head_dim, layout)
    wait_for_step(dk_full, step)
    ds = add_scores(ds, q_tile, CONSUMER, dk_tile, slot, kernel.head_dim)
    of_tile = terms_of_tile(kernel, queries, start, BLOCK_KV)
    of_keys = (0, 0, 0, False)
    if MASKED:
        of_keys = load_keys(
            kernel.problem, queries.marks, start, queries.work.keys.size, BLOCK_KV, layout
        )
    s = warpgroup_mma_wait(2 * PIECES, deps=(s,))
    s, exp2_scale, dcap = shown_scores(kernel, queries, s, start, of_keys, of_tile, MASKED)
    if kernel.results.given:
        # p = exp(s - lse)
        rest2 = l_i[:, None] if ADDS else 0
        p = gl.exp2(exponents(s, exp2_scale, m_i[:, None], rest2, ADDS))
    else:
        # p = exp(s - max), and rescale what was accumulated
        p, alpha, m_i, l_i = online_softmax_update(s, m_i, l_i, exp2_scale, MASKED)
        out, acc = scale_rows(out, alpha), scale_rows(acc, alpha)
        of_sums: gl.constexpr = gl.SliceLayout(1, dlse.type.layout)
        dlse *= gl.convert_layout(alpha, of_sums, assert_trivial=True)[:, None]
    if MASKED:
        clear_visited(
            (v_tile, dv_tile), (v_full, dv_full), step, kernel.problem, queries, index, start
        )
    # out += p v, and acc += p dv
    wait_for_step(v_full, step)
    kept = drop_scaled(p, kernel.terms, of_tile)
    left = kept.to(dtype)
    out = add_product(out, left, v_tile, slot)
    wait_for_step(dv_full, step)
    acc = add_product(acc, left, dv_tile, slot)
    ds = warpgroup_mma_wait(len(out) + PIECES, deps=(ds,))
    arrive(K_READ + slot, READERS)
    # dlse += Σ p ds, without the center, which is the mean over the first tile with a visible key
    ds *= dcap
    if MASKED:
        ds = gl.where(p == 0.0, 0.0, ds)  # what is multiplied for a hidden pair may be NaN
    if MASKED or index == before + after:
        total = gl.sum(p, 1)
        mean = scale * gl.sum(p * ds, 1) / gl.where(total == 0.0, 1.0, total)
        center = gl.where(weight == 0.0, mean, center)
        weight += total
    ds = ds * scale - center[:, None]
    dlse += add_columns(p * ds)
    # acc += (p ∘ ds) v
    dp = (kept * ds).to(dtype)
    acc = add_product(acc, dp, v_tile, slot)
    sums, left, dp = wait_products(out + acc, left, dp, 0)
    arrive(V_READ + slot, READERS)
    return sums[: len(out)], sums[len(out) :], m_i, l_i, dlse, weight, center


@gluon.jit
def _finish_rows(kernel, queries, out, acc, m_i, l_i, dlse, center, CONSUMER: gl.constexpr):
    """Add the sink, and store a consumer's rows."""
    work, rows, heads = queries.work, queries.rows, kernel.problem.heads_q
    ADDS: gl.constexpr = adds_terms(
        kernel.terms.bias.entries, kernel.terms.relative, kernel.terms.slopes
    )
    sinks_ptr, dsinks_ptr = kernel.sinks_ptr
    first, exists = first_of_head(kernel, queries), rows < work.rows.end
    dlse = gl.convert_layout(gl.sum(dlse, 1), rows.type.layout)
    if kernel.results.given:
        base = head_rows(
            kernel.results.out, work.batch, work.rows.end, queries.first, work.head, heads,
            kernel.head_dim,
        )  # fmt: skip
        out = load_carry(base, exists, heads, kernel.head_dim)
    else:
        l_i, factor = gl.convert_layout(gl.sum(l_i, 1), rows.type.layout), 1.0
        if sinks_ptr is not None:
            factor, m_i, l_i = add_sink(gl.load(sinks_ptr + work.head), m_i, l_i)
        l_safe, lse = row_statistics(m_i, l_i)
        factor /= l_safe
        gl.store(kernel.results.lse + first + rows, lse, mask=exists)
        m_i = gl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
        out, acc, dlse = scale_rows(out, factor), scale_rows(acc, factor), dlse * factor
        _store(kernel, kernel.results.out, kernel.tiles[1], queries, out, CONSUMER)
    if sinks_ptr is not None:
        dsink = 0.0
        if dsinks_ptr is not None:
            dsink = gl.load(dsinks_ptr + work.head)
        power = exponents(gl.load(sinks_ptr + work.head), 1.0 if ADDS else LOG2E, m_i, l_i, ADDS)
        dlse += gl.exp2(power) * (dsink - center)
    result = ()
    for i in gl.static_range(len(acc)):
        result = result + (acc[i] - scale_rows((out[i].to(gl.float32),), dlse)[0],)
    _store(kernel, kernel.results.dout, kernel.tiles[0], queries, result, CONSUMER)
    gl.store(kernel.results.dlse + first + rows, dlse + center, mask=exists)


@gluon.jit
def _store(kernel, maps, tile, queries, x, CONSUMER: gl.constexpr):
    work = queries.work
    store_result(
        maps, tile, CONSUMER, x, work.batch, work.head, queries.first, work.rows.end,
        kernel.problem.heads_q, kernel.problem.num_sequences is not None, kernel.head_dim,
    )  # fmt: skip
