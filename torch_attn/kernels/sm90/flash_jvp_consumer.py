"""A warpgroup that computes the tangents of 64 rows of each work item, for SM90."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from torch_attn.kernels.explicit.barriers import K_READ, V_READ, arrive, wait_for_step
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
    rescale,
    scale_rows,
    wait_products,
    zeros,
)
from torch_attn.kernels.explicit.wgmma_scores import exponents
from torch_attn.kernels.library.softmax import LOG2E, add_sink, load_forward_lse, row_statistics
from torch_attn.kernels.sm90.work import clear_visited, own_queries, shown_scores, terms_of_tile


class Kernel(NamedTuple):
    """Hold what a consumer needs for all items, constants last; there are no block masks."""

    tiles: Any
    barriers: Any
    shared: Any
    results: Any
    terms: Any
    problem: Any
    rule: Any
    left: Any
    right: Any
    sinks_ptr: Any
    dsinks_ptr: Any
    lists: Any
    q_ranges: Any
    block_q: Any
    head_dim: Any
    head_dim_v: Any
    edges: Any


@gluon.jit
def consume(kernel, CONSUMER: gl.constexpr):
    BLOCK_KV: gl.constexpr = kernel.tiles[2][0].shape[3]
    q_full, q_read, _k_full, _v_full = kernel.barriers
    step = 0  # counted over all items
    turn = 0
    item, place = own_item(turn, kernel.problem, kernel.shared, CONSUMER)
    while item < kernel.problem.num_items:
        queries = own_queries(kernel, item, place, CONSUMER, BLOCK_KV)
        m_i, l_i, out = _start_rows(kernel, queries, BLOCK_KV)
        acc = zeros(64, kernel.head_dim_v)
        dlse = add_columns(gl.zeros([64, BLOCK_KV], gl.float32, product_layout(BLOCK_KV)))
        weight = gl.full([64], 0.0, gl.float32, queries.rows.type.layout)
        center = weight
        mbarrier.wait(q_full.index(CONSUMER), turn & 1)

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
def _start_rows(kernel, queries, BLOCK_KV: gl.constexpr):
    """Return m_i, l_i and out's accumulator; in place of these the given lse2, rest2 and ()."""
    layout: gl.constexpr = product_layout(BLOCK_KV)
    if kernel.results.given:
        m_i, l_i = load_forward_lse(
            kernel.results.lse, kernel.terms, _first_of_head(kernel, queries), queries.rows,
            queries.rows < queries.work.rows.end,
        )  # fmt: skip
        out = ()
    else:
        m_i = gl.full([64], float("-inf"), gl.float32, queries.rows.type.layout)
        l_i = add_columns(gl.zeros([64, BLOCK_KV], gl.float32, layout))
        out = zeros(64, kernel.head_dim_v)
    return m_i, l_i, out


@gluon.jit
def _visit(
    kernel, queries, index, step, out, acc, m_i, l_i, dlse, weight, center, MASKED: gl.constexpr,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """Add a tile of keys; while ds is multiplied, p is computed."""
    q_tile, dq_tile, k_tile, dk_tile, v_tile, dv_tile, _out_tile, _dout_tile = kernel.tiles
    _q_full, _q_read, k_full, v_full = kernel.barriers
    NUM_STAGES: gl.constexpr = k_tile[0].shape[0]
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    READERS: gl.constexpr = 2 * kernel.block_q + 32
    dtype: gl.constexpr = q_tile[0].dtype
    layout: gl.constexpr = product_layout(BLOCK_KV)
    ADDS: gl.constexpr = adds_terms(
        kernel.terms.bias.entries, kernel.terms.relative, kernel.terms.slopes
    )
    slot = step % NUM_STAGES
    start = step_start(index, *queries.work.visits, BLOCK_KV)
    # s = scale · q kᵀ, and ds = scale · (dq kᵀ + q dkᵀ)
    wait_for_step(k_full, step)
    s = product_scores(q_tile, CONSUMER, k_tile, slot, kernel.head_dim, layout)
    if len(dq_tile) > 0:
        ds = product_scores(dq_tile, CONSUMER, k_tile, slot, kernel.head_dim, layout)
        if len(dk_tile) > 0:
            ds = add_scores(ds, q_tile, CONSUMER, dk_tile, slot, kernel.head_dim)
    else:
        ds = product_scores(q_tile, CONSUMER, dk_tile, slot, kernel.head_dim, layout)
    OF_DS: gl.constexpr = num_pieces(kernel.head_dim) * (
        2 if len(dq_tile) > 0 and len(dk_tile) > 0 else 1
    )
    of_tile = terms_of_tile(kernel, queries, start, BLOCK_KV)
    of_keys = (0, 0, 0, False)
    if MASKED:
        of_keys = load_keys(
            kernel.problem, queries.marks, start, queries.work.keys.size, BLOCK_KV, layout
        )
    # p = exp(s - lse), or of the maximum so far
    s = warpgroup_mma_wait(OF_DS, deps=(s,))
    s, scale, dcap = shown_scores(kernel, queries, s, start, of_keys, of_tile, MASKED)
    if kernel.results.given:
        rest2 = l_i
        if ADDS:
            rest2 = l_i[:, None]
        p = gl.exp2(exponents(s, scale, m_i[:, None], rest2, ADDS))
    else:
        # In float16, p ∘ ds might overflow below a maximum that is behind.
        ON_DEMAND: gl.constexpr = dtype == gl.bfloat16 and kernel.head_dim_v <= 64
        p, alpha, m_i, l_i = online_softmax_update(s, m_i, l_i, scale, MASKED, ON_DEMAND)
        out, acc = rescale(out, alpha, ON_DEMAND), rescale(acc, alpha, ON_DEMAND)
        of_sums: gl.constexpr = gl.SliceLayout(1, dlse.type.layout)
        dlse *= gl.convert_layout(alpha, of_sums, assert_trivial=True)[:, None]
    # out += p v, and acc += p dv
    if MASKED:
        clear_visited((v_tile,), (v_full,), step, kernel.problem, queries, index, start)
        if len(dv_tile) > 0:
            clear_visited((dv_tile,), (v_full,), step, kernel.problem, queries, index, start)
    wait_for_step(v_full, step)
    kept = drop_scaled(p, kernel.terms, of_tile)
    left = kept.to(dtype)
    out = add_product(out, left, v_tile, slot)
    if len(dv_tile) > 0:
        acc = add_product(acc, left, dv_tile, slot)
    OF_P: gl.constexpr = num_pieces(kernel.head_dim_v) * (
        (0 if kernel.results.given else 1) + (1 if len(dv_tile) > 0 else 0)
    )
    ds = warpgroup_mma_wait(OF_P, deps=(ds,))
    arrive(K_READ + slot, READERS)
    # dlse += Σ p ds, without the center, which is the mean over the first tile with a visible key
    ds *= dcap
    if MASKED:
        ds = gl.where(p == 0.0, 0.0, ds)  # what is multiplied or added for a hidden pair may be NaN
        weight, center = _find_center(p, ds, weight, center, kernel.rule.scale)
    elif index == queries.work.visits[1] + queries.work.visits[3]:
        weight, center = _find_center(p, ds, weight, center, kernel.rule.scale)
    ds = ds * kernel.rule.scale - center[:, None]
    dlse += add_columns(p * ds)
    # acc += (p ∘ ds) v
    dp = (kept * ds).to(dtype)
    acc = add_product(acc, dp, v_tile, slot)
    sums, left, dp = wait_products(out + acc, left, dp, 0)
    arrive(V_READ + slot, READERS)
    return sums[: len(out)], sums[len(out) :], m_i, l_i, dlse, weight, center


@gluon.jit
def _find_center(p, ds, weight, center, scale):
    total = gl.sum(p, 1)
    mean = scale * gl.sum(p * ds, 1) / gl.where(total == 0.0, 1.0, total)
    return weight + total, gl.where(weight == 0.0, mean, center)


@gluon.jit
def _finish_rows(kernel, queries, out, acc, m_i, l_i, dlse, center, CONSUMER: gl.constexpr):
    """Add the sink, and store a consumer's rows."""
    work, rows, heads = queries.work, queries.rows, kernel.problem.heads_q
    end = work.rows.end
    first, exists = _first_of_head(kernel, queries), rows < end
    dlse = gl.convert_layout(gl.sum(dlse, 1), rows.type.layout)
    if kernel.results.given:
        base = head_rows(
            kernel.results.out, work.batch, end, queries.first, work.head, heads, kernel.head_dim_v
        )
        out = load_carry(base, exists, heads, kernel.head_dim_v)
    else:
        l_i = gl.convert_layout(gl.sum(l_i, 1), rows.type.layout)
        alpha = 1.0
        if kernel.sinks_ptr is not None:
            alpha, m_i, l_i = add_sink(gl.load(kernel.sinks_ptr + work.head), m_i, l_i)
        l_i, lse = row_statistics(m_i, l_i)
        gl.store(kernel.results.lse + first + rows, lse, mask=exists)
        out, acc, dlse = scale_rows(out, alpha / l_i), scale_rows(acc, alpha / l_i), dlse * alpha / l_i
        _store(kernel, kernel.results.out, kernel.tiles[6], out, queries, CONSUMER)
        m_i = gl.where(lse == float("-inf"), float("inf"), lse) * LOG2E
    if kernel.sinks_ptr is not None:
        dsink = 0.0
        if kernel.dsinks_ptr is not None:
            dsink = gl.load(kernel.dsinks_ptr + work.head)
        ADDS: gl.constexpr = adds_terms(
        kernel.terms.bias.entries, kernel.terms.relative, kernel.terms.slopes
    )
        sink = gl.load(kernel.sinks_ptr + work.head)
        power = exponents(sink, 1.0 if ADDS else LOG2E, m_i, l_i, ADDS)
        dlse += gl.exp2(power) * (dsink - center)
    acc = _without(acc, dlse, out)
    _store(kernel, kernel.results.dout, kernel.tiles[7], acc, queries, CONSUMER)
    gl.store(kernel.results.dlse + first + rows, dlse + center, mask=exists)


@gluon.jit
def _store(kernel, maps, tile, x, queries, CONSUMER: gl.constexpr):
    work = queries.work
    store_result(
        maps, tile, CONSUMER, x, work.batch, work.head, queries.first, work.rows.end,
        kernel.problem.heads_q, kernel.problem.num_sequences is not None, kernel.head_dim_v,
    )  # fmt: skip


@gluon.jit
def _without(acc, dlse, out):
    """Return acc - dlse ∘ out."""
    result = ()
    for i in gl.static_range(len(acc)):
        result = result + (acc[i] - scale_rows((out[i].to(gl.float32),), dlse)[0],)
    return result


@gluon.jit
def _first_of_head(kernel, queries):
    work = queries.work
    return (work.batch * kernel.problem.heads_q + work.head).to(gl.int64) * kernel.problem.size
