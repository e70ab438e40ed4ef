"""Flash attention, backward: dq, then dk and dv; `kernels.preprocess` prepares the rows.

With p recomputed from lse, ``dp = dout vᵀ`` and ``delta = rowsum(dout ∘ out) - dlse``:
``ds = p ∘ (dp - delta) ∘ dcap``, where dcap is the softcap's derivative, ``dq = scale · ds k``,
``dk = scale · dsᵀ q``, ``dv = pᵀ dout``. A sink is a score without a value, so its dp is 0. With
dropout, dp and the p of dv are multiplied by `dropout_weights`.
Dao 2023, FlashAttention-2, algorithm 2, with a separate kernel for dq instead of atomic additions:
the result has the same bits every time.
"""

from typing import Any

import triton
import triton.language as tl

from torch_attn.kernels.flash_bwd_bias import bias_gradient
from torch_attn.kernels.flash_bwd_terms import relative_gradient
from torch_attn.kernels.gradients import BackwardKernels, make_flash_bwd
from torch_attn.kernels.library.dropout import dropout_weights
from torch_attn.kernels.library.intervals import in_interval, load_intervals
from torch_attn.kernels.library.mask import (
    listed_tiles,
    mask_argument,
    seen_tiles,
    visited_row,
)
from torch_attn.kernels.library.schedule import longest_first, order_argument
from torch_attn.kernels.library.scores import add_product, round_operand, visible_scores
from torch_attn.kernels.library.segments import (
    STAYS,
    VISITED,
    load_segments,
    segments_of_batch,
)
from torch_attn.kernels.library.sequences import (
    count_sequence_tiles,
    first_tile,
    locate_tile,
    num_sequence_tiles,
)
from torch_attn.kernels.library.softmax import probabilities
from torch_attn.kernels.library.terms import added_scores, store_bias_tile, terms_argument
from torch_attn.kernels.library.tiles import (
    ROW_PADDING,
    count_tiles,
    head_base,
    load_stored,
    load_tile,
    padded_head_dim,
    split_step,
    store_tile,
    strides_of,
)
from torch_attn.kernels.library.tree import (
    count_runs,
    ending_tiles,
    find_runs,
    in_branch,
    next_run,
)
from torch_attn.launch import UNSPECIALIZED, KernelCall, Prepared, flash_arguments, has_carry
from twin_attention.targets.schedule import programs_of_sm


@triton.jit(do_not_specialize=UNSPECIALIZED)
def flash_bwd_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse2_ptr,
    delta_ptr,
    dq_ptr,
    terms,
    mask,
    strides,
    seq_q,
    seq_kv,
    diagonal,
    num_sequences,
    heads_q,
    together,
    rule,
    window_left,
    window_right,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CARRY: tl.constexpr,
):
    """One program computes BLOCK_Q rows of dq of one query head.

    Operands: q, k, v, dout with strides as in `flash_fwd_kernel`; lse2 and delta of
    `flash_bwd_preprocess_kernel` and dq [B, Sq, Hq, D] contiguous. Grid, diagonal, rule, terms and
    mask: as in `flash_fwd_kernel`. Loop invariant: dq is Σ ds k over the keys so far. Accumulation:
    float32, exponents in base 2, ds cast to k's dtype for ds·k. A row that sees no key gives 0.
    CARRY: dq, in float32, holds the gradient through other keys, to which the gradient through
    these keys is added. The gradient of a bias that no two pairs share is ds, stored if terms have
    dbias.
    """
    # Locate the tile of queries.
    num_tiles = count_sequence_tiles(seq_q, num_sequences, BLOCK_Q)
    index, tile = longest_first(num_tiles, together)
    head = index % heads_q
    batch = (index // heads_q).to(tl.int64)
    start_q = tile * BLOCK_Q
    total_q, first_kv, element, own_q = seq_q, None, batch, start_q
    if num_sequences is not None:
        sequence, first_q, start_q, seq_q, first_kv, seq_kv = locate_tile(
            mask.offsets.q, mask.offsets.kv, tile, seq_q, seq_kv, num_sequences, BLOCK_Q
        )
        batch, diagonal = tl.cast(0, tl.int64), seq_kv - seq_q
        element, own_q = sequence, start_q - first_q
    segments = mask.segments
    if segments is not None:
        segments = segments_of_batch(segments, batch, seq_q, seq_kv, seq_kv)
    tree, depths, runs = mask.tree, mask.depths, None
    row_kv = batch * seq_kv if first_kv is None else first_kv
    head_kv = head // GROUP_SIZE
    k_base = head_base(k_ptr, strides.k, batch, head_kv, first_kv)
    v_base = head_base(v_ptr, strides.v, batch, head_kv, first_kv)

    # Load the queries and their per-row values; they stay.
    q_base = head_base(q_ptr, strides.q, batch, head)
    dout_base = head_base(dout_ptr, strides.dout, batch, head)
    segment_q, is_query = None, None
    if segments is not None:
        segment_q, is_query = load_segments(segments.q, start_q, seq_q, BLOCK_Q, STAYS)
    q = load_tile(q_base, start_q, seq_q, strides.q.row, BLOCK_Q, HEAD_DIM, True, is_query)
    do = load_tile(dout_base, start_q, seq_q, strides.dout.row, BLOCK_Q, HEAD_DIM_V, True, is_query)
    q, do = round_operand(q, rule.precision), round_operand(do, rule.precision)
    rows = start_q + tl.arange(0, BLOCK_Q)
    position = rows + diagonal
    offset = (batch * heads_q + head) * count_sequence_tiles(
        total_q, num_sequences, ROW_PADDING
    ) * ROW_PADDING  # fmt: skip
    if num_sequences is not None:
        offset += first_tile(first_q, sequence, ROW_PADDING).to(tl.int64) * ROW_PADDING - first_q
    lse2 = tl.load(lse2_ptr + offset + rows)
    delta = tl.load(delta_ptr + offset + rows)
    rest2 = None
    if terms.rest2 is not None:
        rest2 = tl.load(terms.rest2 + offset + rows)[:, None]
    begins, ends = None, None
    if mask.intervals is not None:
        begins, ends = load_intervals(mask.intervals, start_q, seq_q, BLOCK_Q)
    dq = tl.zeros([BLOCK_Q, padded_head_dim(HEAD_DIM)], tl.float32)

    # Visit the tiles of keys that these queries see; only tiles at the edges are masked.
    begin, before, full, after = seen_tiles(
        segments, segment_q, begins, ends, start_q, seq_q, seq_kv, diagonal, window_left,
        window_right, BLOCK_Q, BLOCK_KV,
    )  # fmt: skip
    list_ptr, begin, before, full, after = listed_tiles(
        mask.lists, batch, head, start_q, begin, before, full, after, BLOCK_KV
    )
    if tree is not None:
        runs = find_runs(
            tree, depths, batch, batch * seq_q, start_q, seq_q, row_kv, seq_kv, diagonal, begin,
            before, full, after, BLOCK_Q,
        )  # fmt: skip
        before, full, after = 0, 0, 0
    for masked in tl.static_range(2):
        first, end = 0, count_tiles(before, full, after, masked)
        for _run in tl.range(0, count_runs(depths, runs, BLOCK_KV, masked)):
            if tree is not None:
                first, end = next_run(depths, runs, end, BLOCK_KV, masked)
            # Start at 0: from another number, Triton 3.9 does not always pipeline the loads.
            for step in tl.range(0, end - first):
                start_kv = visited_row(
                    mask.lists, list_ptr, first + step, begin, before, full, seq_kv, BLOCK_KV,
                    masked,
                )  # fmt: skip
                # s = scale · q kᵀ
                segment_kv, is_key, seen = None, None, None
                if segments is not None:
                    segment_kv, is_key = load_segments(
                        segments.kv, start_kv, seq_kv, BLOCK_KV, VISITED
                    )
                k = load_tile(
                    k_base, start_kv, seq_kv, strides.k.row, BLOCK_KV, HEAD_DIM, masked, is_key
                )
                k = round_operand(k, rule.precision)
                key = start_kv + tl.arange(0, BLOCK_KV)
                if begins is not None:
                    seen = in_interval(begins, ends, key)
                if tree is not None:
                    seen = in_branch(
                        tree, depths, batch * seq_q, rows[:, None], seq_q, row_kv, key[None, :],
                        seq_kv, position[:, None],
                    )  # fmt: skip
                distance = start_kv - start_q - diagonal
                added = added_scores(
                    terms, element, head, distance, start_q, start_kv, seq_q, seq_kv, BLOCK_Q,
                    BLOCK_KV, masked,
                )  # fmt: skip
                s, dcap = visible_scores(
                    q, k, position[:, None], key[None, :], seq_kv, rule, window_left, window_right,
                    masked, segment_q, segment_kv, seen, added,
                )  # fmt: skip
                # p = exp(s - lse)
                p = probabilities(s, lse2[:, None], rest2, rule.exp2_scale)
                # dp = dout vᵀ
                v = load_tile(
                    v_base, start_kv, seq_kv, strides.v.row, BLOCK_KV, HEAD_DIM_V, masked, is_key
                )
                v = round_operand(v, rule.precision)
                dp = tl.dot(do, tl.trans(v), input_precision=rule.precision)
                kept = dropout_weights(terms, element, head, own_q, start_kv, BLOCK_Q, BLOCK_KV)
                if kept is not None:
                    dp = dp * kept
                # ds = p ∘ (dp - delta) ∘ dcap
                ds = p * (dp - delta[:, None]) * dcap
                if terms.dbias.entries is not None:
                    store_bias_tile(
                        terms.dbias, ds, element, head, start_q, start_kv, seq_q, seq_kv, BLOCK_Q,
                        BLOCK_KV,
                    )  # fmt: skip
                # dq += ds k
                ds = round_operand(ds.to(k.dtype), rule.precision)
                dq = tl.dot(ds, k, dq, input_precision=rule.precision)

    # Scale and store.
    dq_row = heads_q * HEAD_DIM
    dq_base = dq_ptr + batch * seq_q * dq_row + head * HEAD_DIM
    dq = dq * rule.scale
    if CARRY:
        dq += load_stored(dq_base, start_q, seq_q, dq_row, BLOCK_Q, HEAD_DIM)
    store_tile(dq_base, dq, start_q, seq_q, dq_row, BLOCK_Q, HEAD_DIM)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def flash_bwd_dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse2_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    terms,
    mask,
    strides,
    seq_q,
    seq_kv,
    diagonal,
    num_sequences,
    heads_q,
    together,
    rule,
    window_left,
    window_right,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """One program computes BLOCK_KV rows of dk and dv of one kv head, summed over its query heads.

    Operands: as in `flash_bwd_dq_kernel`; dk [B, Skv, Hkv, D] and dv [B, Skv, Hkv, Dv] contiguous.
    Grid: (key tiles · kv heads · batch), in the order of `longest_first`. Tiles of s, p, dp, ds are
    transposed (keys down, queries across), so that they can be left operands directly. Loop
    invariant: dk is Σ dsᵀ q and dv is Σ pᵀ dout over the query heads and queries so far.
    Accumulation: float32, exponents in base 2, p and ds cast to the inputs' dtype for their
    products. A key that no query sees gives 0.

    The mask: as in `flash_fwd_kernel`, but for a kernel that visits queries, with
    `count_sequence_tiles` of keys.
    """
    # Locate the tile of keys.
    num_tiles = count_sequence_tiles(seq_kv, num_sequences, BLOCK_KV)
    heads_kv = heads_q // GROUP_SIZE
    index, tile = longest_first(num_tiles, together)
    tile = num_tiles - 1 - tile  # the first keys are seen by most queries
    start_kv = tile * BLOCK_KV
    head_kv = index % heads_kv
    batch = (index // heads_kv).to(tl.int64)
    total_q, first_q, first_kv, element, own_kv = seq_q, 0, 0, batch, start_kv
    if num_sequences is not None:
        sequence, first_kv, start_kv, seq_kv, first_q, seq_q = locate_tile(
            mask.offsets.kv, mask.offsets.q, tile, seq_kv, seq_q, num_sequences, BLOCK_KV
        )
        batch, diagonal = tl.cast(0, tl.int64), seq_kv - seq_q
        element, own_kv = sequence, start_kv - first_kv
    segments = mask.segments
    if segments is not None:
        segments = segments_of_batch(segments, batch, seq_q, seq_kv, seq_q)
    tree, depths = mask.tree, mask.depths
    row_kv, first_position = batch * seq_kv + first_kv, diagonal - first_kv  # of query 0

    # Load the keys and values; they stay.
    k_base = head_base(k_ptr, strides.k, batch, head_kv)
    v_base = head_base(v_ptr, strides.v, batch, head_kv)
    segment_kv, is_key = None, None
    if segments is not None:
        segment_kv, is_key = load_segments(segments.kv, start_kv, seq_kv, BLOCK_KV, STAYS)
    k = load_tile(k_base, start_kv, seq_kv, strides.k.row, BLOCK_KV, HEAD_DIM, True, is_key)
    v = load_tile(v_base, start_kv, seq_kv, strides.v.row, BLOCK_KV, HEAD_DIM_V, True, is_key)
    k, v = round_operand(k, rule.precision), round_operand(v, rule.precision)
    key = start_kv + tl.arange(0, BLOCK_KV) - diagonal  # counted as queries are
    begins, ends = None, None
    if mask.intervals is not None:
        begins, ends = load_intervals(mask.intervals, start_kv, seq_kv, BLOCK_KV)
    dk = tl.zeros([BLOCK_KV, padded_head_dim(HEAD_DIM)], tl.float32)
    dv = tl.zeros([BLOCK_KV, padded_head_dim(HEAD_DIM_V)], tl.float32)

    # Visit the tiles of queries that see these keys; only tiles at the edges are masked.
    begin, before, full, after = seen_tiles(
        segments, segment_kv, begins, ends, start_kv, seq_kv, seq_q, -diagonal, window_right,
        window_left, BLOCK_KV, BLOCK_Q,
    )  # fmt: skip
    if tree is not None:
        begin, before, full, after = ending_tiles(
            tree, depths, row_kv, key + first_position, seq_kv - first_kv, first_position, begin,
            before, full, after, BLOCK_Q,
        )  # fmt: skip
    # If each head has lists, visit one head after the other, otherwise the whole group together.
    GROUP_LISTS: tl.constexpr = 1 if mask.lists is None else mask.lists.of_group
    for first_member in tl.range(0, GROUP_LISTS):
        list_ptr, first, num_before, num_full, num_after = listed_tiles(
            mask.lists, batch, head_kv * GROUP_SIZE + first_member, start_kv, begin, before, full,
            after, BLOCK_Q,
        )  # fmt: skip
        for masked in tl.static_range(2):
            count = count_tiles(num_before, num_full, num_after, masked)
            for step in tl.range(0, count * (GROUP_SIZE // GROUP_LISTS)):
                member, index = split_step(step, count, GROUP_SIZE // GROUP_LISTS)
                start_q = visited_row(
                    mask.lists, list_ptr, index, first, num_before, num_full, seq_q, BLOCK_Q, masked
                )
                if mask.lists is not None:
                    member += first_member
                head = head_kv * GROUP_SIZE + member
                row_q, end_q = start_q, seq_q
                if num_sequences is not None:
                    row_q, end_q = first_q + start_q, first_q + seq_q
                q_base = head_base(q_ptr, strides.q, batch, head)
                dout_base = head_base(dout_ptr, strides.dout, batch, head)
                offset = (batch * heads_q + head) * count_sequence_tiles(
                    total_q, num_sequences, ROW_PADDING
                ) * ROW_PADDING  # fmt: skip
                if num_sequences is not None:
                    offset += first_tile(first_q, sequence, ROW_PADDING).to(tl.int64) * ROW_PADDING
                # sᵀ = scale · k qᵀ
                segment_q, is_query, seen = None, None, None
                if segments is not None:
                    segment_q, is_query = load_segments(segments.q, row_q, end_q, BLOCK_Q, VISITED)
                q = load_tile(
                    q_base, row_q, end_q, strides.q.row, BLOCK_Q, HEAD_DIM, masked, is_query
                )
                q = round_operand(q, rule.precision)
                rows = start_q + tl.arange(0, BLOCK_Q)
                if begins is not None:
                    seen = in_interval(begins, ends, rows)
                if tree is not None:
                    seen = in_branch(
                        tree, depths, batch * seq_q + first_q, rows[None, :], seq_q, row_kv,
                        key[:, None] + first_position, seq_kv - first_kv,
                        rows[None, :] + first_position,
                    )  # fmt: skip
                distance = start_kv - diagonal - start_q
                added = added_scores(
                    terms, element, head, distance, start_q, start_kv, seq_q, seq_kv, BLOCK_Q,
                    BLOCK_KV, True, True,
                )  # fmt: skip
                s, dcap = visible_scores(
                    k, q, rows[None, :], key[:, None], None, rule, window_left, window_right,
                    masked, segment_kv, segment_q, seen, added,
                )  # fmt: skip
                # pᵀ = exp(sᵀ - lse)
                lse2 = tl.load(lse2_ptr + offset + rows)
                rest2 = None
                if terms.rest2 is not None:
                    rest2 = tl.load(terms.rest2 + offset + rows)[None, :]
                p = probabilities(s, lse2[None, :], rest2, rule.exp2_scale)
                # dpᵀ = v doutᵀ
                do = load_tile(
                    dout_base, row_q, end_q, strides.dout.row, BLOCK_Q, HEAD_DIM_V, masked, is_query
                )
                do = round_operand(do, rule.precision)
                dp = tl.dot(v, tl.trans(do), input_precision=rule.precision)
                kept_p = p
                kept = dropout_weights(
                    terms, element, head, start_q, own_kv, BLOCK_Q, BLOCK_KV, True
                )
                if kept is not None:
                    kept_p, dp = p * kept, dp * kept
                # dv += pᵀ dout
                rounded = round_operand(kept_p.to(do.dtype), rule.precision)
                dv = add_product(dv, rounded, do, rule.precision)
                # dsᵀ = pᵀ ∘ (dpᵀ - delta) ∘ dcapᵀ
                delta = tl.load(delta_ptr + offset + rows)
                ds = p * (dp - delta[None, :]) * dcap
                # dk += dsᵀ q
                ds = round_operand(ds.to(q.dtype), rule.precision)
                dk = add_product(dk, ds, q, rule.precision)

    # Scale and store.
    dk_row = heads_kv * HEAD_DIM
    dv_row = heads_kv * HEAD_DIM_V
    dk_base = dk_ptr + batch * seq_kv * dk_row + head_kv * HEAD_DIM
    dv_base = dv_ptr + batch * seq_kv * dv_row + head_kv * HEAD_DIM_V
    store_tile(dk_base, dk * rule.scale, start_kv, seq_kv, dk_row, BLOCK_KV, HEAD_DIM)
    store_tile(dv_base, dv, start_kv, seq_kv, dv_row, BLOCK_KV, HEAD_DIM_V)


def prepare_dq(call: KernelCall) -> Prepared:
    """Return the grid and the arguments of `flash_bwd_dq_kernel`."""
    spec = call.spec
    tiles = num_sequence_tiles(spec, spec.seq_q, call.config.block_q)
    programs = programs_of_sm(call.config.block_q, spec.head_dim)
    arguments = _arguments(call, tiles, programs) | mask_argument(call, of_keys=True)
    arguments["CARRY"] = has_carry(spec)
    return (tiles * spec.heads_q * spec.batch,), arguments


def prepare_dkdv(call: KernelCall) -> Prepared:
    """Return the grid and the arguments of `flash_bwd_dkdv_kernel`."""
    spec = call.spec
    tiles = num_sequence_tiles(spec, spec.seq_kv, call.config.block_kv)
    programs = programs_of_sm(call.config.block_kv, spec.head_dim, spec.head_dim_v)
    arguments = _arguments(call, tiles, programs) | mask_argument(call, of_keys=False)
    return (tiles * spec.heads_kv * spec.batch,), arguments


def _arguments(call: KernelCall, tiles: int, programs: int) -> dict[str, Any]:
    q, k, v, dout, *_ = call.layouts
    arguments = flash_arguments(call.spec) | {"strides": strides_of(q=q, k=k, v=v, dout=dout)}
    return arguments | terms_argument(call) | order_argument(call, tiles, programs)


flash_bwd = make_flash_bwd(
    BackwardKernels(
        dq=(flash_bwd_dq_kernel, prepare_dq),
        dkdv=((flash_bwd_dkdv_kernel, prepare_dkdv),),
        terms_gradients=(bias_gradient, relative_gradient),
    )
)
