"""Flash attention, forward.

``out = softmax(mask(softcap(scale · q kᵀ))) v`` and ``lse = log Σ exp``, one pass over the keys.
Dao 2023, FlashAttention-2, algorithm 1.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_attn.kernels.library.dropout import dropout_weights
from torch_attn.kernels.library.intervals import in_interval, load_intervals
from torch_attn.kernels.library.mask import (
    listed_tiles,
    mask_argument,
    mask_of_keys,
    seen_tiles,
    visited_row,
)
from torch_attn.kernels.library.schedule import longest_first, order_argument
from torch_attn.kernels.library.scores import round_operand, visible_scores
from torch_attn.kernels.library.segments import (
    STAYS,
    VISITED,
    load_segments,
    segments_of_batch,
)
from torch_attn.kernels.library.sequences import (
    count_sequence_tiles,
    locate_tile,
    num_sequence_tiles,
)
from torch_attn.kernels.library.softmax import (
    LN2,
    LOG2E,
    add_sink,
    online_softmax_update,
    rest_of_lse,
    row_statistics,
)
from torch_attn.kernels.library.terms import added_scores, terms_argument, terms_of
from torch_attn.kernels.library.tiles import (
    count_tiles,
    head_base,
    load_stored,
    load_tile,
    padded_head_dim,
    store_tile,
    strides_of,
)
from torch_attn.kernels.library.tree import count_runs, find_runs, in_branch, next_run
from torch_attn.launch import (
    UNSPECIALIZED,
    KernelCall,
    Prepared,
    flash_arguments,
    launch,
)
from twin_attention.contract.operands import AttentionOperands
from twin_attention.contract.spec import AttentionSpec, BlockSparseSpec
from twin_attention.targets.family import Backend
from twin_attention.targets.schedule import programs_of_sm


@triton.jit(do_not_specialize=UNSPECIALIZED)
def flash_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    out_ptr,
    lse_ptr,
    row_max_ptr,
    carry_ptr,
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
    """One program computes BLOCK_Q rows of one query head.

    Operands: q [B, Sq, Hq, D], k [B, Skv, Hkv, D], v [B, Skv, Hkv, Dv], with `FlashStrides`; sinks
    [Hq] float32 or None; out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] (float32, natural log) contiguous;
    row_max [B, Hq, Sq] float32, each row's largest score, or None.
    Query i stands at key position i + diagonal; rule: `twin_attention.contract.spec.ScoreRule`.
    Grid: (query tiles · heads · batch), in the order of `longest_first`. Loop invariant:
    `online_softmax_update`. Accumulation: float32, exponents in base 2, p cast to v's dtype for
    p·v. A row that sees no key gives 0, and -inf or its sink. BLOCK_Q and BLOCK_KV are powers of
    two, at least 16.

    Terms that are added to the scores, and dropout: `torch_attn.kernels.library.terms.Terms`.

    carry_ptr: [B, Sq, Hq, Dv] float32, a result over other keys, whose lse is in lse and to which
    these keys are added; or None.

    The mask: `torch_attn.kernels.library.mask.Mask`. With packed sequences tensors have no batch
    axis, Sq and Skv count all tokens, and the grid has `count_sequence_tiles` of queries;
    num_sequences is None otherwise. A tile of a block mask has multiples of BLOCK_Q queries and
    BLOCK_KV keys.
    """
    ADDED: tl.constexpr = terms.rest is not None
    # Locate the tile of queries.
    num_tiles = count_sequence_tiles(seq_q, num_sequences, BLOCK_Q)
    index, tile = longest_first(num_tiles, together)
    head = index % heads_q
    batch = (index // heads_q).to(tl.int64)
    start_q = tile * BLOCK_Q
    total_q, first_kv, element, own_q = seq_q, None, batch, start_q
    if num_sequences is not None:
        # Queries are counted from the first of all sequences, keys from the sequence's first.
        element, first_q, start_q, seq_q, first_kv, seq_kv = locate_tile(
            mask.offsets.q, mask.offsets.kv, tile, seq_q, seq_kv, num_sequences, BLOCK_Q
        )
        own_q = start_q - first_q
        batch, diagonal = tl.cast(0, tl.int64), seq_kv - seq_q
    segments = mask.segments
    if segments is not None:
        segments = segments_of_batch(segments, batch, seq_q, seq_kv, seq_kv)
    tree, depths, runs = mask.tree, mask.depths, None
    row_kv = batch * seq_kv if first_kv is None else first_kv
    head_kv = head // GROUP_SIZE
    k_base = head_base(k_ptr, strides.k, batch, head_kv, first_kv)
    v_base = head_base(v_ptr, strides.v, batch, head_kv, first_kv)

    # Load the queries; they stay.
    q_base = head_base(q_ptr, strides.q, batch, head)
    segment_q, is_query = None, None
    if segments is not None:
        segment_q, is_query = load_segments(segments.q, start_q, seq_q, BLOCK_Q, STAYS)
    q = load_tile(q_base, start_q, seq_q, strides.q.row, BLOCK_Q, HEAD_DIM, True, is_query)
    q = round_operand(q, rule.precision)
    rows = start_q + tl.arange(0, BLOCK_Q)
    position = rows + diagonal
    begins, ends = None, None
    if mask.intervals is not None:
        begins, ends = load_intervals(mask.intervals, start_q, seq_q, BLOCK_Q)
    m_i = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_Q], tl.float32)
    if sinks_ptr is not None and row_max_ptr is None:
        # Include the sink in the maximum from the start, so that acc is not rescaled for it at the
        # end.
        sink = tl.load(sinks_ptr + head)
        m_i = tl.maximum(m_i, sink if ADDED else sink * LOG2E)
    acc = tl.zeros([BLOCK_Q, padded_head_dim(HEAD_DIM_V)], tl.float32)
    if carry_ptr is not None:
        lse_rows = lse_ptr + (batch * heads_q + head) * total_q + rows
        m_carry = tl.load(lse_rows, mask=rows < seq_q, other=float("-inf")) * LOG2E
        m_i = tl.maximum(m_i, m_carry)
        l_i = tl.where(m_carry == float("-inf"), 0.0, 1.0)
        row = heads_q * HEAD_DIM_V
        carry = carry_ptr + batch * seq_q * row + head * HEAD_DIM_V
        has_carry = m_carry > float("-inf")
        acc = load_stored(carry, start_q, seq_q, row, BLOCK_Q, HEAD_DIM_V, has_carry)

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
                offset = start_kv - start_q - diagonal
                added = added_scores(
                    terms, element, head, offset, start_q, start_kv, seq_q, seq_kv, BLOCK_Q,
                    BLOCK_KV, masked,
                )  # fmt: skip
                s, _ = visible_scores(
                    q, k, position[:, None], key[None, :], seq_kv, rule, window_left, window_right,
                    masked, segment_q, segment_kv, seen, added,
                )  # fmt: skip
                # p = exp(s - max), and rescale what was accumulated
                p, alpha, m_i, l_i = online_softmax_update(s, m_i, l_i, rule.exp2_scale, ADDED)
                acc = acc * alpha[:, None]
                kept = dropout_weights(terms, element, head, own_q, start_kv, BLOCK_Q, BLOCK_KV)
                if kept is not None:
                    p = p * kept
                # acc += p v
                v = load_tile(
                    v_base, start_kv, seq_kv, strides.v.row, BLOCK_KV, HEAD_DIM_V, masked, is_key
                )
                v = round_operand(v, rule.precision)
                p = round_operand(p.to(v.dtype), rule.precision)
                acc = tl.dot(p, v, acc, input_precision=rule.precision)

    # Normalise and store.
    if row_max_ptr is not None:
        row_max = row_max_ptr + (batch * heads_q + head) * total_q + rows
        tl.store(row_max, m_i if ADDED else m_i * LN2, mask=rows < seq_q)
    if sinks_ptr is not None:
        alpha, m_i, l_i = add_sink(tl.load(sinks_ptr + head), m_i, l_i, ADDED)
        if row_max_ptr is not None:
            acc = acc * alpha[:, None]
    l_safe, lse = row_statistics(m_i, l_i, ADDED)
    if ADDED:
        rest = terms.rest + (batch * heads_q + head) * total_q + rows
        tl.store(rest, rest_of_lse(lse, m_i, l_safe), mask=rows < seq_q)
    out_row = heads_q * HEAD_DIM_V
    out_base = out_ptr + batch * seq_q * out_row + head * HEAD_DIM_V
    out = acc / l_safe[:, None]
    store_tile(out_base, out, start_q, seq_q, out_row, BLOCK_Q, HEAD_DIM_V)
    tl.store(lse_ptr + (batch * heads_q + head) * total_q + rows, lse, mask=rows < seq_q)


def flash_fwd(
    operands: AttentionOperands[Tensor],
    spec: AttentionSpec,
    backend: Backend,
) -> tuple[Tensor, ...]:
    """Launch `flash_fwd_kernel`.

    Returns:
        out [B, Sq, Hq, Dv] in q's dtype and lse [B, Hq, Sq] float32; then, as lse, `rest_of_lse` if
        there are terms, and each row's largest score if the problem asks for it. All are
        contiguous, without B for packed sequences.
    """
    q = operands.q
    out = q.new_empty((*q.shape[:-1], spec.head_dim_v))
    shape = (*q.shape[:-3], spec.heads_q, spec.seq_q)
    lse, rest, row_max = (
        q.new_empty(shape, dtype=torch.float32) if is_result else None
        for is_result in (True, spec.terms, spec.row_max)
    )
    assert lse is not None
    launch_forward(operands, out, lse, spec, backend, row_max, rest=rest)
    return tuple(x for x in (out, lse, rest, row_max) if x is not None)


def launch_forward(
    operands: AttentionOperands[Tensor],
    out: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    backend: Backend,
    row_max: Tensor | None = None,
    carry: Tensor | None = None,
    rest: Tensor | None = None,
) -> None:
    """Launch `flash_fwd_kernel` on given outputs."""
    mask = mask_of_keys(operands, spec)
    terms = terms_of(operands, spec)._replace(rest=rest)
    tensors = (*operands[:3], operands.sinks, out, lse, row_max, carry, terms, mask)
    launch(
        "flash_fwd",
        flash_fwd_kernel,
        _prepare,
        tensors,
        spec,
        backend,
        maxnreg=_register_limit(spec, backend.target),
    )


def _register_limit(spec: AttentionSpec, target: str | None) -> int | None:
    """Return the register limit of a thread; None leaves it to the compiler.

    At head size 64 the compiler uses 134 registers, but 128 suffice and let four programs share an
    SM: on an H200, 4x4096 tokens take 8 % less time, 5 % under a causal mask.
    """
    size = max(spec.head_dim, spec.head_dim_v)
    is_near = target == "sm90" and spec.dtype_bits == 16 and spec.softcap is None
    hides = spec.segmented or spec.tree or isinstance(spec, BlockSparseSpec)
    is_near = is_near and not hides and not spec.terms and spec.dropout is None
    return 128 if is_near and 32 < size <= 64 else None


def _prepare(call: KernelCall) -> Prepared:
    """Return the grid and the arguments of `flash_fwd_kernel`."""
    spec = call.spec
    q, k, v, *_ = call.layouts
    tiles = num_sequence_tiles(spec, spec.seq_q, call.config.block_q)
    programs = programs_of_sm(call.config.block_q, spec.head_dim_v)
    arguments = flash_arguments(spec) | {"strides": strides_of(q=q, k=k, v=v)}
    arguments |= terms_argument(call) | mask_argument(call, of_keys=True)
    arguments |= order_argument(call, tiles, programs)
    return (tiles * spec.heads_q * spec.batch,), arguments
