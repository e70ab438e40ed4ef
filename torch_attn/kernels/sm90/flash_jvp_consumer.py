"""A warpgroup that computes the tangents of 64 rows of each work item, for SM90."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from torch_attn.kernels.explicit.barriers import K_READ, READERS, V_READ, arrive, wait_for_step
from torch_attn.kernels.explicit.carry import head_rows, load_carry
from torch_attn.kernels.explicit.hidden import load_keys
from torch_attn.kernels.explicit.items import own_item
from torch_attn.kernels.explicit.softmax import add_columns
from torch_attn.kernels.explicit.steps import step_start
from torch_attn.kernels.explicit.terms import adds_terms, drop_scaled
from torch_attn.kernels.explicit.tma import num_pieces
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
from torch_attn.kernels.library.softmax import LOG2E, load_forward_lse
from torch_attn.kernels.sm90.work import (
    RowStatistics,
    clear_visited,
    first_of_head,
    own_queries,
    probabilities,
    store_rows,
    terms_of_tile,
)


@gluon.jit
def consume(kernel, CONSUMER: gl.constexpr):
    """Compute all items' rows; a kernel's sinks_ptr is a pair with their tangents.

    Its results are a forward's out, a contiguous [B, Sq, Hq, D], and lse, and their tangents.
    """
    _out, lse, _dout, _dlse = kernel.results
    q_full, dq_full, q_read, _k_full, _dk_full, _v_full, _dv_full = kernel.barriers
    BLOCK_KV: gl.constexpr = kernel.tiles[2][0].shape[3]
    step = 0  # counted over all items
    turn = 0
    item, place = own_item(turn, kernel.problem, kernel.shared, CONSUMER)
    while item < kernel.problem.num_items:
        queries = own_queries(kernel, item, place, CONSUMER, BLOCK_KV)
        dlse = add_columns(gl.zeros([64, BLOCK_KV], gl.float32, product_layout(BLOCK_KV)))
        weight = gl.full([64], 0.0, gl.float32, queries.rows.type.layout)
        center = weight
        acc = zeros(64, kernel.head_dim)
        lse2, rest2 = load_forward_lse(
            lse, kernel.terms, first_of_head(kernel, queries), queries.rows,
            queries.rows < queries.work.rows.end,
        )  # fmt: skip
        statistics = RowStatistics(lse2, None, rest2)
        mbarrier.wait(q_full.index(CONSUMER), turn & 1)
        mbarrier.wait(dq_full.index(CONSUMER), turn & 1)

        # Visit the tiles of keys that these queries see; only tiles at the edges are masked.
        _begin, before, full, after = queries.work.visits
        index = 0
        for masked in gl.static_range(1 if kernel.edges else 0, -1, -1):
            end = before + after if masked else before + full + after
            while index < end:
                acc, dlse, weight, center = _visit(
                    kernel, queries, statistics, index, step, acc, dlse, weight, center, masked,
                    CONSUMER,
                )  # fmt: skip
                index += 1
                step += 1

        _finish_rows(kernel, queries, statistics, acc, dlse, center, CONSUMER)
        tma.store_wait(0)
        mbarrier.arrive(q_read.index(CONSUMER), count=1)
        turn += 1
        item, place = own_item(turn, kernel.problem, kernel.shared, CONSUMER)


@gluon.jit
def _visit(
    kernel, queries, statistics, index, step, acc, dlse, weight, center, MASKED: gl.constexpr,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """Add a tile of keys. p is computed while ds is multiplied, and ds while p dv is."""
    q_tile, dq_tile, k_tile, dk_tile, v_tile, dv_tile = kernel.tiles
    _q_full, _dq_full, _q_read, k_full, dk_full, v_full, dv_full = kernel.barriers
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    PIECES: gl.constexpr = num_pieces(kernel.head_dim)
    dtype: gl.constexpr = q_tile[0].dtype
    layout: gl.constexpr = product_layout(BLOCK_KV)
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
    # p = exp(s - lse)
    s = warpgroup_mma_wait(2 * PIECES, deps=(s,))
    p, dcap = probabilities(kernel, queries, statistics, s, start, of_keys, of_tile, MASKED)
    if MASKED:
        clear_visited(
            (v_tile, dv_tile), (v_full, dv_full), step, kernel.problem, queries, index, start
        )
    # acc += p dv
    wait_for_step(v_full, step)
    kept = drop_scaled(p, kernel.terms, of_tile)
    left = kept.to(dtype)
    wait_for_step(dv_full, step)
    acc = add_product(acc, left, dv_tile, slot)
    ds = warpgroup_mma_wait(PIECES, deps=(ds,))
    arrive(K_READ + slot, READERS)
    # dlse += Σ p ds, without the center, which is the mean over the first tile with a visible key
    ds *= dcap
    if MASKED:
        ds = gl.where(p == 0.0, 0.0, ds)  # what is multiplied for a hidden pair may be NaN
    if MASKED or index == before + after:
        total = gl.sum(p, 1)
        mean = kernel.rule.scale * gl.sum(p * ds, 1) / gl.where(total == 0.0, 1.0, total)
        center = gl.where(weight == 0.0, mean, center)
        weight += total
    ds = ds * kernel.rule.scale - center[:, None]
    dlse += add_columns(p * ds)
    # acc += (p ∘ ds) v
    dp = (kept * ds).to(dtype)
    acc = add_product(acc, dp, v_tile, slot)
    acc, left, dp = wait_products(acc, left, dp, 0)
    arrive(V_READ + slot, READERS)
    return acc, dlse, weight, center


@gluon.jit
def _finish_rows(kernel, queries, statistics, acc, dlse, center, CONSUMER: gl.constexpr):
    """Add the sink, and store a consumer's rows."""
    work, heads = queries.work, kernel.problem.heads_q
    out_ptr, _lse, dout, dlse_ptr = kernel.results
    sinks_ptr, dsinks_ptr = kernel.sinks_ptr
    first, exists = first_of_head(kernel, queries), queries.rows < work.rows.end
    dlse = gl.convert_layout(gl.sum(dlse, 1), queries.rows.type.layout)
    base = head_rows(
        out_ptr, work.batch, work.rows.end, queries.first, work.head, heads, kernel.head_dim
    )
    out = load_carry(base, exists, heads, kernel.head_dim)
    if sinks_ptr is not None:
        dsink = 0.0
        if dsinks_ptr is not None:
            dsink = gl.load(dsinks_ptr + work.head)
        ADDS: gl.constexpr = adds_terms(
            kernel.terms.bias.entries, kernel.terms.relative, kernel.terms.slopes
        )
        sink, scale = gl.load(sinks_ptr + work.head), 1.0 if ADDS else LOG2E
        power = exponents(sink, scale, statistics.lse2, statistics.rest2, ADDS)
        dlse += gl.exp2(power) * (dsink - center)
    result = ()
    for i in gl.static_range(len(acc)):
        result = result + (acc[i] - scale_rows((out[i].to(gl.float32),), dlse)[0],)
    store_rows(kernel, queries, dout, kernel.tiles[0], CONSUMER, result, kernel.head_dim)
    gl.store(dlse_ptr + first + queries.rows, dlse + center, mask=exists)
