"""Flash attention, forward (Dao 2023, FlashAttention-2, algorithm 1).

``out = softmax(mask(softcap(scale · q kᵀ))) v`` and ``lse = log Σ exp``, one pass over the keys.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_attn.kernels.library.dropout import kept_pairs
from torch_attn.kernels.library.mask import mask_argument, mask_of_keys
from torch_attn.kernels.library.pairs.rows import load_own, own_queries
from torch_attn.kernels.library.pairs.scores import pair_scores
from torch_attn.kernels.library.pairs.visits import first_key, load_keys, load_values, tiles_of_keys
from torch_attn.kernels.library.runs import count_runs, next_run
from torch_attn.kernels.library.schedule import order_argument
from torch_attn.kernels.library.scores import round_operand
from torch_attn.kernels.library.sequences import num_sequence_tiles
from torch_attn.kernels.library.softmax import (
    LN2,
    LOG2E,
    add_sink,
    online_softmax_update,
    rest_of_lse,
    row_statistics,
)
from torch_attn.kernels.library.terms import terms_argument, terms_of
from torch_attn.kernels.library.tiles import (
    head_base,
    load_stored,
    padded_head_dim,
    store_tile,
    strides_of,
)
from torch_attn.kernels.portable import invariant
from torch_attn.launch import UNSPECIALIZED, KernelCall, Prepared, flash_arguments, launch
from twin_attention.contract.operands import AttentionOperands
from twin_attention.contract.spec import AttentionSpec, BlockSparseSpec
from twin_attention.targets.family import Backend
from twin_attention.targets.schedule import programs_of_sm


@triton.jit(do_not_specialize=UNSPECIALIZED)
def flash_fwd_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, lse_ptr, row_max_ptr, carry_ptr, terms, mask, strides,
    seq_q, seq_kv, diagonal, num_sequences, heads_q, together, rule, window_left, window_right,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_Q rows of one query head.

    Operands: q [B, Sq, Hq, D], k [B, Skv, Hkv, D], v [B, Skv, Hkv, Dv], with `FlashStrides`; sinks
    [Hq] float32 or None; out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] (float32, natural log) contiguous;
    row_max [B, Hq, Sq] float32, each row's largest score, or None; carry [B, Sq, Hq, Dv] float32, a
    result over other keys, whose lse is in lse and to which these keys are added, or None; `Terms`,
    `Mask` and `twin_attention.contract.spec.ScoreRule`. Query i stands at key position i +
    diagonal. Grid: (query tiles · heads · batch), in the order of `longest_first`. Loop invariant:
    `online_softmax_update`. Accumulation: float32, exponents in base 2, p cast to v's dtype for
    p·v. A row that sees no key gives 0, and -inf or its sink. BLOCK_Q and BLOCK_KV are powers of
    two, at least 16, and divide a block mask's tile.

    With packed sequences tensors have no batch axis, Sq and Skv count all tokens, and the grid has
    `count_sequence_tiles` of queries; num_sequences is None otherwise.
    """
    ADDED: tl.constexpr = terms.rest is not None
    # Locate the tile of queries.
    rows = own_queries(mask, seq_q, seq_kv, diagonal, num_sequences, heads_q, together, BLOCK_Q)
    k_base = head_base(k_ptr, strides.k, rows.batch, rows.head // GROUP_SIZE, rows.first_other)
    v_base = head_base(v_ptr, strides.v, rows.batch, rows.head // GROUP_SIZE, rows.first_other)

    # Load the queries; they stay.
    q = load_own(q_ptr, strides.q, mask, rows, rule, HEAD_DIM)
    m_i, l_i, acc = _begin_rows(
        sinks_ptr, row_max_ptr, lse_ptr, carry_ptr, rows, seq_q, heads_q, HEAD_DIM_V, ADDED
    )

    # Visit the tiles of keys that these queries see; only tiles at the edges are masked.
    tiles = tiles_of_keys(mask, rows, window_left, window_right, BLOCK_KV)
    for masked in tl.static_range(2):
        end = 0
        for _run in tl.range(0, count_runs(mask, rows, tiles, BLOCK_KV, masked)):
            first, end = next_run(mask, rows, tiles, end, BLOCK_KV, masked)
            # Start at 0: from another number, Triton 3.9 does not always pipeline the loads.
            for step in tl.range(0, end - first):
                start_kv = first_key(mask, rows, tiles, first + step, BLOCK_KV, masked)
                # s = scale · q kᵀ
                k, keys = load_keys(
                    k_base, strides.k.row, mask, rows, start_kv, rule, BLOCK_KV, HEAD_DIM, masked
                )
                s, _ = pair_scores(
                    q, k, mask, terms, rule, rows, keys, window_left, window_right, masked
                )
                # p = exp(s - max), and rescale what was accumulated
                p, alpha, m_i, l_i = online_softmax_update(s, m_i, l_i, rule.exp2_scale, ADDED)
                acc = acc * alpha[:, None]
                p = p * kept_pairs(terms, rows, keys)
                # acc += p v
                v = load_values(v_base, strides.v.row, mask, keys, rule, HEAD_DIM_V, masked)
                p = round_operand(p.to(v.dtype), rule.precision)
                acc = tl.dot(p, v, acc, input_precision=rule.precision)

    # Normalise and store.
    _store_rows(
        sinks_ptr, out_ptr, lse_ptr, row_max_ptr, terms.rest, rows, m_i, l_i, acc, seq_q, heads_q,
        HEAD_DIM_V,
    )  # fmt: skip


@triton.jit
def _begin_rows(
    sinks_ptr, row_max_ptr, lse_ptr, carry_ptr, rows, seq_q, heads_q, HEAD_DIM_V: tl.constexpr,
    ADDED: tl.constexpr,
):  # fmt: skip
    BLOCK_Q: tl.constexpr = rows.rows.shape[0]
    m_i = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_Q], tl.float32)
    if sinks_ptr is not None and row_max_ptr is None:
        # The sink is in the maximum from the start, so the end need not rescale acc for it.
        sink = tl.load(sinks_ptr + rows.head)
        m_i = tl.maximum(m_i, sink if ADDED else sink * LOG2E)
    acc = tl.zeros([BLOCK_Q, padded_head_dim(HEAD_DIM_V)], tl.float32)
    if carry_ptr is not None:
        lse_rows = lse_ptr + (rows.batch * heads_q + rows.head) * seq_q + rows.rows
        m_carry = tl.load(lse_rows, mask=rows.rows < rows.end, other=float("-inf")) * LOG2E
        m_i = tl.maximum(m_i, m_carry)
        l_i = tl.where(m_carry == float("-inf"), 0.0, 1.0)
        row = heads_q * HEAD_DIM_V
        carry = carry_ptr + rows.batch * rows.end * row + rows.head * HEAD_DIM_V
        has_carry = m_carry > float("-inf")
        acc = load_stored(carry, rows.start, rows.end, row, BLOCK_Q, HEAD_DIM_V, has_carry)
    return m_i, l_i, acc


@triton.jit
def _store_rows(
    sinks_ptr, out_ptr, lse_ptr, row_max_ptr, rest_ptr, rows, m_i, l_i, acc, seq_q, heads_q,
    HEAD_DIM_V: tl.constexpr,
):  # fmt: skip
    ADDED: tl.constexpr = rest_ptr is not None
    head_row = (rows.batch * heads_q + rows.head) * seq_q
    exists = rows.rows < rows.end
    if row_max_ptr is not None:
        tl.store(row_max_ptr + head_row + rows.rows, m_i if ADDED else m_i * LN2, mask=exists)
    if sinks_ptr is not None:
        alpha, m_i, l_i = add_sink(tl.load(sinks_ptr + rows.head), m_i, l_i, ADDED)
        if row_max_ptr is not None:
            acc = acc * alpha[:, None]
    l_safe, lse = row_statistics(m_i, l_i, ADDED)
    if ADDED:
        tl.store(rest_ptr + head_row + rows.rows, rest_of_lse(lse, m_i, l_safe), mask=exists)
    out_row = heads_q * HEAD_DIM_V
    out_base = out_ptr + rows.batch * rows.end * out_row + rows.head * HEAD_DIM_V
    out = acc / l_safe[:, None]
    store_tile(out_base, out, rows.start, rows.end, out_row, rows.rows.shape[0], HEAD_DIM_V)
    tl.store(lse_ptr + head_row + rows.rows, lse, mask=exists)


def flash_fwd(
    operands: AttentionOperands[Tensor], spec: AttentionSpec, backend: Backend
) -> tuple[Tensor, ...]:
    """Launch `flash_fwd_kernel`.

    Return out [B, Sq, Hq, Dv] in q's dtype and lse [B, Hq, Sq] float32; then, as lse, `rest_of_lse`
    if there are terms, and each row's largest score if the problem asks for it; all contiguous.
    """
    q = operands.q
    out = q.new_empty((*q.shape[:-1], spec.head_dim_v))
    shape = (*q.shape[:-3], spec.heads_q, spec.seq_q)
    lse, rest, row_max = (
        q.new_empty(shape, dtype=torch.float32) if is_result else None
        for is_result in (True, spec.terms, spec.row_max)
    )
    assert lse is not None
    if spec.batch_invariant:
        invariant.flash_fwd(operands, out, lse, row_max, spec, backend)
        return tuple(x for x in (out, lse, row_max) if x is not None)
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
    """Return a thread's register limit or None: 128 at head size 64, for four programs."""
    size = max(spec.head_dim, spec.head_dim_v)
    is_near = target == "sm90" and spec.dtype_bits == 16 and spec.softcap is None
    hides = spec.segmented or spec.tree or spec.ranges or isinstance(spec, BlockSparseSpec)
    is_near = is_near and not hides and not spec.terms and spec.dropout is None
    return 128 if is_near and 32 < size <= 64 else None


def _prepare(call: KernelCall) -> Prepared:
    spec = call.spec
    q, k, v, *_ = call.layouts
    tiles = num_sequence_tiles(spec, spec.seq_q, call.config.block_q)
    programs = programs_of_sm(call.config.block_q, spec.head_dim_v)
    arguments = flash_arguments(spec) | {"strides": strides_of(q=q, k=k, v=v)}
    arguments |= terms_argument(call) | mask_argument(call, of_keys=True)
    arguments |= order_argument(call, tiles, programs)
    return (tiles * spec.heads_q * spec.batch,), arguments
