"""Flash attention, backward: a preprocess of rows, then dq, then dk and dv.

With p recomputed from lse, ``dp = dout vᵀ`` and ``delta = rowsum(dout ∘ out) - dlse``:
``ds = p ∘ (dp - delta)``, ``dq = scale · ds k``, ``dk = scale · dsᵀ q``, ``dv = pᵀ dout``.
Dao 2023, FlashAttention-2, algorithm 2, with a kernel for dq of its own instead of atomic
additions: the result is the same bits every time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_attn.kernels.portable.scores import (
    add_product,
    attention_mask,
    attention_scores,
    softcap_derivative,
)
from torch_attn.kernels.portable.softmax import LOG2E
from torch_attn.kernels.portable.tiles import (
    ROW_PADDING,
    count_tiles,
    head_base,
    load_tile,
    split_step,
    store_tile,
    tile_start,
    visible_tiles,
)
from torch_attn.launch import UNSPECIALIZED, launch, problem_arguments, stride_arguments
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.config import padded_head_dim


@triton.jit(do_not_specialize=["seq_q"])
def flash_bwd_preprocess_kernel(
    dout_ptr,
    out_ptr,
    lse_ptr,
    dlse_ptr,
    lse2_ptr,
    delta_ptr,
    dout_batch,
    dout_head,
    out_batch,
    out_head,
    seq_q,
    heads_q,
    DOUT_ROW: tl.constexpr,
    OUT_ROW: tl.constexpr,
    ALIGN: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """What the other kernels need of each row; one program has BLOCK_Q rows of a head.

    ``delta = rowsum(dout ∘ out) - dlse``, and lse2 is lse in base 2, or +inf where a row saw no
    key or does not exist, so that ``exp2(s - lse2)`` is 0 there. Operands: dout and out
    [B, Sq, Hq, Dv] with the given strides; lse and dlse [B, Hq, Sq] contiguous; lse2 and
    delta [B, Hq, Sq rounded up to ROW_PADDING], all float32. Grid: (query tiles, heads, batch) in
    one axis.
    """
    num_rows = tl.cdiv(seq_q, ROW_PADDING) * ROW_PADDING
    num_tiles = num_rows // BLOCK_Q
    start_q = tl.program_id(0) % num_tiles * BLOCK_Q
    head = tl.program_id(0) // num_tiles % heads_q
    batch = (tl.program_id(0) // num_tiles // heads_q).to(tl.int64)
    dout_base = head_base(dout_ptr, batch, head, dout_batch, dout_head, ALIGN)
    out_base = head_base(out_ptr, batch, head, out_batch, out_head, ALIGN)
    do = load_tile(dout_base, start_q, seq_q, DOUT_ROW, BLOCK_Q, HEAD_DIM_V, BLOCK_DV, True)
    out = load_tile(out_base, start_q, seq_q, OUT_ROW, BLOCK_Q, HEAD_DIM_V, BLOCK_DV, True)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    rows = start_q + tl.arange(0, BLOCK_Q)
    offset = (batch * heads_q + head) * seq_q
    lse = tl.load(lse_ptr + offset + rows, mask=rows < seq_q, other=float("inf"))
    lse2 = tl.where(lse == float("-inf"), float("inf"), lse) * LOG2E
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + offset + rows, mask=rows < seq_q, other=0.0)
    padded_offset = (batch * heads_q + head) * num_rows
    tl.store(lse2_ptr + padded_offset + rows, lse2)
    tl.store(delta_ptr + padded_offset + rows, delta)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def flash_bwd_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse2_ptr,
    delta_ptr,
    dq_ptr,
    q_batch,
    q_head,
    k_batch,
    k_head,
    v_batch,
    v_head,
    dout_batch,
    dout_head,
    seq_q,
    seq_kv,
    heads_q,
    scale,
    exp2_scale,
    softcap,
    window_left,
    window_right,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    DOUT_ROW: tl.constexpr,
    ALIGN: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SCALE_FIRST: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """One program computes BLOCK_Q rows of dq of one query head.

    Operands: q, k, v, dout with the given strides and a contiguous last dimension; lse2 and
    delta of `flash_bwd_preprocess_kernel` and dq [B, Sq, Hq, D] contiguous. Grid: as in
    `flash_fwd_kernel`.
    Loop invariant: dq is Σ ds k over the keys so far. Accumulation: float32, exponents in base 2,
    ds cast to k's dtype for ds·k. A row that sees no key gives 0.
    """
    # Locate the tile of queries.
    num_tiles = tl.cdiv(seq_q, BLOCK_Q)
    tile = num_tiles - 1 - tl.program_id(0) % num_tiles
    head = tl.program_id(0) // num_tiles % heads_q
    batch = (tl.program_id(0) // num_tiles // heads_q).to(tl.int64)
    start_q = tile * BLOCK_Q
    head_kv = head // GROUP_SIZE
    k_base = head_base(k_ptr, batch, head_kv, k_batch, k_head, ALIGN)
    v_base = head_base(v_ptr, batch, head_kv, v_batch, v_head, ALIGN)

    # Load the queries and what belongs to their rows; they stay.
    q_base = head_base(q_ptr, batch, head, q_batch, q_head, ALIGN)
    dout_base = head_base(dout_ptr, batch, head, dout_batch, dout_head, ALIGN)
    q = load_tile(q_base, start_q, seq_q, Q_ROW, BLOCK_Q, HEAD_DIM, BLOCK_D, True)
    do = load_tile(dout_base, start_q, seq_q, DOUT_ROW, BLOCK_Q, HEAD_DIM_V, BLOCK_DV, True)
    rows = start_q + tl.arange(0, BLOCK_Q)
    position = rows + seq_kv - seq_q
    offset = (batch * heads_q + head) * tl.cdiv(seq_q, ROW_PADDING) * ROW_PADDING
    lse2 = tl.load(lse2_ptr + offset + rows)
    delta = tl.load(delta_ptr + offset + rows)
    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)

    # Visit the tiles of keys that these queries see; only tiles at the edges are masked.
    begin, before, full, after = visible_tiles(
        start_q, seq_q, seq_kv, window_left, window_right, BLOCK_Q, BLOCK_KV, HAS_LEFT, HAS_RIGHT
    )
    for masked in tl.static_range(2):
        for index in tl.range(0, count_tiles(before, full, after, masked)):
            start_kv = tile_start(index, begin, before, full, BLOCK_KV, masked)
            # s = scale · q kᵀ
            k = load_tile(k_base, start_kv, seq_kv, K_ROW, BLOCK_KV, HEAD_DIM, BLOCK_D, masked)
            s = attention_scores(q, k, scale, softcap, SCALE_FIRST, HAS_SOFTCAP)
            if HAS_SOFTCAP:
                dcap = softcap_derivative(s, softcap)
            if masked:
                key = start_kv + tl.arange(0, BLOCK_KV)
                s = attention_mask(
                    s, position[:, None], key[None, :], seq_kv, window_left, window_right,
                    HAS_LEFT, HAS_RIGHT,
                )  # fmt: skip
            # p = exp(s - lse)
            p = tl.exp2(s * exp2_scale - lse2[:, None])
            # dp = dout vᵀ
            v = load_tile(v_base, start_kv, seq_kv, V_ROW, BLOCK_KV, HEAD_DIM_V, BLOCK_DV, masked)
            dp = tl.dot(do, tl.trans(v), input_precision="ieee")
            # ds = p ∘ (dp - delta)
            ds = p * (dp - delta[:, None])
            if HAS_SOFTCAP:
                ds = ds * dcap
            # dq += ds k
            dq = add_product(dq, ds.to(k.dtype), k)

    # Scale and store.
    dq_row = heads_q * HEAD_DIM
    dq_base = dq_ptr + batch * seq_q * dq_row + head * HEAD_DIM
    store_tile(dq_base, dq * scale, start_q, seq_q, dq_row, BLOCK_Q, HEAD_DIM, BLOCK_D)


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
    q_batch,
    q_head,
    k_batch,
    k_head,
    v_batch,
    v_head,
    dout_batch,
    dout_head,
    seq_q,
    seq_kv,
    heads_q,
    scale,
    exp2_scale,
    softcap,
    window_left,
    window_right,
    Q_ROW: tl.constexpr,
    K_ROW: tl.constexpr,
    V_ROW: tl.constexpr,
    DOUT_ROW: tl.constexpr,
    ALIGN: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SCALE_FIRST: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """One program computes BLOCK_KV rows of dk and dv of one kv head, summed over its query heads.

    Operands: as in `flash_bwd_dq_kernel`; dk [B, Skv, Hkv, D] and dv [B, Skv, Hkv, Dv] contiguous.
    Grid: (key tiles, kv heads, batch) in one axis, key tiles fastest, first tile first, since
    under a causal mask it is the longest. Tiles of s, p, dp, ds are transposed (keys down, queries
    across), so that they are left operands as they are. Loop invariant: dk is Σ dsᵀ q and dv is
    Σ pᵀ dout over the query heads and queries so far. Accumulation: float32, exponents in base 2,
    p and ds cast to the inputs' dtype for their products. A key that no query sees gives 0.
    """
    # Locate the tile of keys.
    num_tiles = tl.cdiv(seq_kv, BLOCK_KV)
    heads_kv = heads_q // GROUP_SIZE
    start_kv = tl.program_id(0) % num_tiles * BLOCK_KV
    head_kv = tl.program_id(0) // num_tiles % heads_kv
    batch = (tl.program_id(0) // num_tiles // heads_kv).to(tl.int64)

    # Load the keys and values; they stay.
    k_base = head_base(k_ptr, batch, head_kv, k_batch, k_head, ALIGN)
    v_base = head_base(v_ptr, batch, head_kv, v_batch, v_head, ALIGN)
    k = load_tile(k_base, start_kv, seq_kv, K_ROW, BLOCK_KV, HEAD_DIM, BLOCK_D, True)
    v = load_tile(v_base, start_kv, seq_kv, V_ROW, BLOCK_KV, HEAD_DIM_V, BLOCK_DV, True)
    key = start_kv + tl.arange(0, BLOCK_KV) - (seq_kv - seq_q)  # counted as queries are
    dk = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_KV, BLOCK_DV], tl.float32)

    # Visit the tiles of queries that see these keys; only tiles at the edges are masked.
    begin, before, full, after = visible_tiles(
        start_kv, seq_kv, seq_q, window_right, window_left, BLOCK_KV, BLOCK_Q, HAS_RIGHT, HAS_LEFT
    )
    for masked in tl.static_range(2):
        count = count_tiles(before, full, after, masked)
        for step in tl.range(0, count * GROUP_SIZE):
            member, index = split_step(step, count, GROUP_SIZE)
            start_q = tile_start(index, begin, before, full, BLOCK_Q, masked)
            head = head_kv * GROUP_SIZE + member
            q_base = head_base(q_ptr, batch, head, q_batch, q_head, ALIGN)
            dout_base = head_base(dout_ptr, batch, head, dout_batch, dout_head, ALIGN)
            offset = (batch * heads_q + head) * tl.cdiv(seq_q, ROW_PADDING) * ROW_PADDING
            # sᵀ = scale · k qᵀ
            q = load_tile(q_base, start_q, seq_q, Q_ROW, BLOCK_Q, HEAD_DIM, BLOCK_D, masked)
            s = attention_scores(k, q, scale, softcap, SCALE_FIRST, HAS_SOFTCAP)
            if HAS_SOFTCAP:
                dcap = softcap_derivative(s, softcap)
            rows = start_q + tl.arange(0, BLOCK_Q)
            if masked:
                s = attention_mask(
                    s, rows[None, :], key[:, None], None, window_left, window_right,
                    HAS_LEFT, HAS_RIGHT,
                )  # fmt: skip
            # pᵀ = exp(sᵀ - lse)
            lse2 = tl.load(lse2_ptr + offset + rows)
            p = tl.exp2(s * exp2_scale - lse2[None, :])
            # dpᵀ = v doutᵀ
            do = load_tile(
                dout_base, start_q, seq_q, DOUT_ROW, BLOCK_Q, HEAD_DIM_V, BLOCK_DV, masked
            )
            dp = tl.dot(v, tl.trans(do), input_precision="ieee")
            # dv += pᵀ dout
            dv = add_product(dv, p.to(do.dtype), do)
            # dsᵀ = pᵀ ∘ (dpᵀ - delta)
            delta = tl.load(delta_ptr + offset + rows)
            ds = p * (dp - delta[None, :])
            if HAS_SOFTCAP:
                ds = ds * dcap
            # dk += dsᵀ q
            dk = add_product(dk, ds.to(q.dtype), q)

    # Scale and store.
    dk_row = heads_kv * HEAD_DIM
    dv_row = heads_kv * HEAD_DIM_V
    dk_base = dk_ptr + batch * seq_kv * dk_row + head_kv * HEAD_DIM
    dv_base = dv_ptr + batch * seq_kv * dv_row + head_kv * HEAD_DIM_V
    store_tile(dk_base, dk * scale, start_kv, seq_kv, dk_row, BLOCK_KV, HEAD_DIM, BLOCK_D)
    store_tile(dv_base, dv, start_kv, seq_kv, dv_row, BLOCK_KV, HEAD_DIM_V, BLOCK_DV)


def flash_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the three kernels of the backward.

    Args:
        dout: [B, Sq, Hq, Dv], any strides with a contiguous last dimension.
        dlse: [B, Hq, Sq] float32, contiguous, or None for zero.
        q, k, v, out, lse: inputs and outputs of the forward.

    Returns:
        dq, dk, dv, shaped as q, k, v, in their dtype, contiguous.
    """
    padded = triton.cdiv(spec.seq_q, ROW_PADDING.value) * ROW_PADDING.value
    lse2, delta = (lse.new_empty((*lse.shape[:2], padded)) for _ in range(2))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))

    def problem():
        return problem_arguments(spec) | stride_arguments(q=q, k=k, v=v, dout=dout)

    def query_tiles(config):
        return (triton.cdiv(spec.seq_q, config.block_q) * spec.heads_q * spec.batch,)

    def key_tiles(config):
        return (triton.cdiv(spec.seq_kv, config.block_kv) * spec.heads_kv * spec.batch,)

    launch(
        "flash_bwd_preprocess",
        flash_bwd_preprocess_kernel,
        lambda config: (padded // config.block_q * spec.heads_q * spec.batch,),
        (dout, out, lse, dlse, lse2, delta),
        lambda: (
            stride_arguments(dout=dout, out=out)
            | {
                "seq_q": spec.seq_q,
                "heads_q": spec.heads_q,
                "HAS_DLSE": dlse is not None,
                "HEAD_DIM_V": spec.head_dim_v,
                "BLOCK_DV": padded_head_dim(spec.head_dim_v),
            }
        ),
        spec,
    )
    operands = (q, k, v, dout, lse2, delta)
    launch(
        "flash_bwd_dq",
        flash_bwd_dq_kernel,
        query_tiles,
        (*operands, dq),
        problem,
        spec,
    )
    launch(
        "flash_bwd_dkdv",
        flash_bwd_dkdv_kernel,
        key_tiles,
        (*operands, dk, dv),
        problem,
        spec,
    )
    return dq, dk, dv
