"""Flash attention, backward: dq, then dk and dv; `kernels.preprocess` prepares the rows.

With p recomputed from lse, ``dp = dout vᵀ`` and ``delta = rowsum(dout ∘ out) - dlse``:
``ds = p ∘ (dp - delta) ∘ dcap``, where dcap is the softcap's derivative, ``dq = scale · ds k``,
``dk = scale · dsᵀ q``, ``dv = pᵀ dout``. A sink is a score without a value, so its dp is 0. With
dropout, dp and the p of dv are multiplied by the weights of `kept_pairs`.
Dao 2023, FlashAttention-2, algorithm 2, but with a separate kernel for dq, not atomic additions:
the same bits every time.
"""

from typing import Any

import triton
import triton.language as tl

from torch_attn.kernels.flash_bwd_bias import bias_gradient
from torch_attn.kernels.flash_bwd_terms import relative_gradient
from torch_attn.kernels.gradients import BackwardKernels, make_flash_bwd
from torch_attn.kernels.library.dropout import kept_pairs
from torch_attn.kernels.library.mask import mask_argument
from torch_attn.kernels.library.pairs.rows import load_own, own_keys, own_queries
from torch_attn.kernels.library.pairs.scores import pair_scores, store_gradients
from torch_attn.kernels.library.pairs.visits import (
    first_key,
    first_row,
    load_keys,
    load_queries,
    load_values,
    tiles_of_keys,
    tiles_of_queries,
)
from torch_attn.kernels.library.runs import count_runs, next_run
from torch_attn.kernels.library.schedule import order_argument
from torch_attn.kernels.library.scores import add_product, round_operand
from torch_attn.kernels.library.sequences import num_sequence_tiles, padded_row
from torch_attn.kernels.library.softmax import load_lse, probabilities
from torch_attn.kernels.library.terms import terms_argument
from torch_attn.kernels.library.tiles import (
    head_base,
    load_stored,
    padded_head_dim,
    split_step,
    store_tile,
    strides_of,
)
from torch_attn.launch import UNSPECIALIZED, KernelCall, Prepared, flash_arguments, has_carry
from twin_attention.targets.schedule import programs_of_sm


@triton.jit(do_not_specialize=UNSPECIALIZED)
def flash_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dq_ptr, terms, mask, strides, seq_q, seq_kv,
    diagonal, num_sequences, heads_q, together, rule, window_left, window_right,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, CARRY: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_Q rows of dq of one query head.

    Operands and grid: as in `flash_fwd_kernel`; lse2 and delta of `flash_bwd_preprocess_kernel`; dq
    [B, Sq, Hq, D] contiguous. Loop invariant: dq is Σ ds k over the keys so far. Accumulation:
    float32, exponents in base 2, ds cast to k's dtype. A row that sees no key gives 0. CARRY: dq,
    in float32, holds the gradient through other keys, to which this one is added. ds is stored if
    terms have dbias.
    """
    # Locate the tile of queries.
    rows = own_queries(mask, seq_q, seq_kv, diagonal, num_sequences, heads_q, together, BLOCK_Q)
    k_base = head_base(k_ptr, strides.k, rows.batch, rows.head // GROUP_SIZE, rows.first_other)
    v_base = head_base(v_ptr, strides.v, rows.batch, rows.head // GROUP_SIZE, rows.first_other)

    # Load the queries and their rows' data; they stay.
    q = load_own(q_ptr, strides.q, mask, rows, rule, HEAD_DIM)
    do = load_own(dout_ptr, strides.dout, mask, rows, rule, HEAD_DIM_V)
    head = rows.batch * heads_q + rows.head
    row = padded_row(head, seq_q, num_sequences, rows.first, rows.element) - rows.first
    lse2, rest2 = load_lse(lse2_ptr, terms, row, rows.rows)
    delta = tl.load(delta_ptr + row + rows.rows)
    dq = tl.zeros([BLOCK_Q, padded_head_dim(HEAD_DIM)], tl.float32)

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
                s, dcap = pair_scores(
                    q, k, mask, terms, rule, rows, keys, window_left, window_right, masked
                )
                # p = exp(s - lse)
                p = probabilities(s, lse2, rest2, terms, rule.exp2_scale)
                # dp = dout vᵀ
                v = load_values(v_base, strides.v.row, mask, keys, rule, HEAD_DIM_V, masked)
                dp = tl.dot(do, tl.trans(v), input_precision=rule.precision)
                dp = dp * kept_pairs(terms, rows, keys)
                # ds = p ∘ (dp - delta) ∘ dcap
                ds = p * (dp - delta[:, None]) * dcap
                store_gradients(terms, ds, rows, keys)
                # dq += ds k
                ds = round_operand(ds.to(k.dtype), rule.precision)
                dq = tl.dot(ds, k, dq, input_precision=rule.precision)

    # Scale and store.
    dq_row = heads_q * HEAD_DIM
    dq_base = dq_ptr + rows.batch * rows.end * dq_row + rows.head * HEAD_DIM
    dq = dq * rule.scale
    if CARRY:
        dq += load_stored(dq_base, rows.start, rows.end, dq_row, BLOCK_Q, HEAD_DIM)
    store_tile(dq_base, dq, rows.start, rows.end, dq_row, BLOCK_Q, HEAD_DIM)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def flash_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr, terms, mask, strides, seq_q,
    seq_kv, diagonal, num_sequences, heads_q, together, rule, window_left, window_right,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_KV rows of dk and dv of one kv head, summed over its query heads.

    Operands: as in `flash_bwd_dq_kernel`, with the mask of a kernel that visits queries; dk [B,
    Skv, Hkv, D] and dv [B, Skv, Hkv, Dv] contiguous. Grid: (key tiles · kv heads · batch), in the
    order of `longest_first`. Tiles of s, p, dp, ds are transposed (keys down), so that they can be
    left operands directly. Loop invariant: dk is Σ dsᵀ q and dv is Σ pᵀ dout over the query heads
    and queries so far. Accumulation: float32, exponents in base 2, p and ds cast to the inputs'
    dtype. A key that no query sees gives 0.
    """
    # Locate the tile of keys.
    heads_kv = heads_q // GROUP_SIZE
    rows = own_keys(mask, seq_q, seq_kv, diagonal, num_sequences, heads_kv, together, BLOCK_KV)

    # Load the keys and values; they stay.
    k = load_own(k_ptr, strides.k, mask, rows, rule, HEAD_DIM)
    v = load_own(v_ptr, strides.v, mask, rows, rule, HEAD_DIM_V)
    dk = tl.zeros([BLOCK_KV, padded_head_dim(HEAD_DIM)], tl.float32)
    dv = tl.zeros([BLOCK_KV, padded_head_dim(HEAD_DIM_V)], tl.float32)

    # Visit the tiles of queries that see these keys; only tiles at the edges are masked.
    # Walk over them for each head that has lists, otherwise once for the group.
    WALKS: tl.constexpr = 1 if mask.lists is None else mask.lists.of_group
    for walk in tl.range(0, WALKS):
        first_head = rows.head * GROUP_SIZE + walk
        tiles = tiles_of_queries(mask, rows, first_head, window_left, window_right, BLOCK_Q)
        for masked in tl.static_range(2):
            end = 0
            for _run in tl.range(0, count_runs(mask, rows, tiles, BLOCK_Q, masked, True)):
                first, end = next_run(mask, rows, tiles, end, BLOCK_Q, masked, True)
                count = end - first
                for step in tl.range(0, count * (GROUP_SIZE // WALKS)):
                    member, index = split_step(step, count, GROUP_SIZE // WALKS)
                    head = first_head + member
                    start_q = first_row(mask, rows, tiles, first + index, BLOCK_Q, masked)
                    q_base = head_base(q_ptr, strides.q, rows.batch, head)
                    do_base = head_base(dout_ptr, strides.dout, rows.batch, head)
                    row = rows.batch * heads_q + head
                    row = padded_row(row, seq_q, num_sequences, rows.first_other, rows.element)
                    # sᵀ = scale · k qᵀ
                    q, queries = load_queries(
                        q_base, strides.q.row, mask, rows, head, start_q, rule, BLOCK_Q, HEAD_DIM,
                        masked,
                    )  # fmt: skip
                    s, dcap = pair_scores(
                        k, q, mask, terms, rule, rows, queries, window_left, window_right, masked,
                        True,
                    )  # fmt: skip
                    # pᵀ = exp(sᵀ - lse)
                    lse2, rest2 = load_lse(lse2_ptr, terms, row, queries.rows)
                    p = probabilities(s, lse2, rest2, terms, rule.exp2_scale, True)
                    # dpᵀ = v doutᵀ
                    do = load_values(
                        do_base, strides.dout.row, mask, queries, rule, HEAD_DIM_V, masked
                    )
                    dp = tl.dot(v, tl.trans(do), input_precision=rule.precision)
                    kept = kept_pairs(terms, rows, queries, True)
                    kept_p, dp = p * kept, dp * kept
                    # dv += pᵀ dout
                    kept_p = round_operand(kept_p.to(do.dtype), rule.precision)
                    dv = add_product(dv, kept_p, do, rule.precision)
                    # dsᵀ = pᵀ ∘ (dpᵀ - delta) ∘ dcapᵀ
                    delta = tl.load(delta_ptr + row + queries.rows)
                    ds = p * (dp - delta[None, :]) * dcap
                    # dk += dsᵀ q
                    ds = round_operand(ds.to(q.dtype), rule.precision)
                    dk = add_product(dk, ds, q, rule.precision)

    # Scale and store.
    dk_row = heads_kv * HEAD_DIM
    dv_row = heads_kv * HEAD_DIM_V
    dk_base = dk_ptr + rows.batch * rows.end * dk_row + rows.head * HEAD_DIM
    dv_base = dv_ptr + rows.batch * rows.end * dv_row + rows.head * HEAD_DIM_V
    store_tile(dk_base, dk * rule.scale, rows.start, rows.end, dk_row, BLOCK_KV, HEAD_DIM)
    store_tile(dv_base, dv, rows.start, rows.end, dv_row, BLOCK_KV, HEAD_DIM_V)


def prepare_dq(call: KernelCall) -> Prepared:
    spec = call.spec
    tiles = num_sequence_tiles(spec, spec.seq_q, call.config.block_q)
    programs = programs_of_sm(call.config.block_q, spec.head_dim)
    arguments = _arguments(call, tiles, programs) | mask_argument(call, of_keys=True)
    arguments["CARRY"] = has_carry(spec)
    return (tiles * spec.heads_q * spec.batch,), arguments


def prepare_dkdv(call: KernelCall) -> Prepared:
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
