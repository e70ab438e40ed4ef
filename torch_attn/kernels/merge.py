"""Merge attention over disjoint sets of keys into attention over their union (Flash-Decoding).

``lse = log Σ exp lse_n`` and ``out = Σ exp(lse_n - lse) out_n``.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from torch_attn.kernels.library.pages import (
    keys_of_sequence,
    load_rows_at,
    splits_with_keys,
    strides_of_lses,
    strides_of_outputs,
)
from torch_attn.kernels.library.softmax import LOG2E, add_sink
from torch_attn.launch import KernelCall, Prepared, launch
from twin_attention.contract.operands import DecodeOperands, PagedOperands
from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.contract.spec import MergeSpec
from twin_attention.targets.config import padded_head_dim
from twin_attention.targets.family import Backend


@triton.jit
def combine_kernel(
    outs_ptr, lses_ptr, sinks_ptr, lens_ptr, out_ptr, lse_ptr, outs_strides, lses_strides, tokens,
    num_states, capacity, window_left, HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_KEYS: tl.constexpr, PDL: tl.constexpr, BLOCK_STATES: tl.constexpr,
):  # fmt: skip
    """One program merges one row.

    Operands: outs [N, B, S, H, Dv] and lses [N, B, H, S] (float32, natural log) with the given
    strides; sinks [H] float32 or None; out [B, S, H, Dv] and lse [B, H, S] contiguous. Grid:
    (heads, tokens, batch) in one axis, heads fastest. A part whose lse is -inf has no keys: its
    output may hold anything. Accumulation: float32, BLOCK_STATES parts at a time. The maximum
    log-sum-exp is subtracted before the conversion to base 2, so equal ones give weights of 1.

    BLOCK_KEYS: the states are splits of `paged_decode_kernel`, with tiles of that many keys and
    lengths lens [B] int32. Only splits with keys are read; with at most one, the result is already
    there. Otherwise both are None.

    PDL: the launch overlaps the kernel before it (CUDA's programmatic dependent launch), which
    writes the states but no length. Every program waits for it, because the next launch waits for
    this one only.
    """
    # Locate the row.
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    token = (tl.program_id(0) // HEADS % tokens).to(tl.int64)
    batch = (tl.program_id(0) // HEADS // tokens).to(tl.int64)
    if BLOCK_KEYS is not None:
        begin, end = keys_of_sequence(lens_ptr, batch, capacity, tokens, window_left)
        num_states = splits_with_keys(begin, end, num_states, BLOCK_KEYS)
    # Wait in both branches, so that the number of parts is known before the wait.
    if BLOCK_KEYS is not None and num_states <= 1:
        if PDL:
            gdc_wait()
        return
    if PDL:
        gdc_wait()
    outs_ptr += batch * outs_strides.batch + token * outs_strides.token + head * outs_strides.head
    lses_ptr += batch * lses_strides.batch + head * lses_strides.head + token * lses_strides.token

    # Softmax over the parts: their lse are the scores, their outputs the values.
    m_i = float("-inf")
    l_i = 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for start in tl.range(0, num_states, BLOCK_STATES):
        part = start + tl.arange(0, BLOCK_STATES).to(tl.int64)
        is_part = part < num_states
        s = tl.load(lses_ptr + part * lses_strides.state, mask=is_part, other=float("-inf"))
        # Loaded without waiting for the lse.
        x = load_rows_at(outs_ptr, (part,), outs_strides, is_part, HEAD_DIM_V, BLOCK_DV)
        x = tl.where((s > float("-inf"))[:, None], x.to(tl.float32), 0.0)
        m_new = tl.maximum(m_i, tl.max(s, 0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2((s - m_safe) * LOG2E)
        alpha = tl.exp2((m_i - m_safe) * LOG2E)
        acc = acc * alpha + tl.sum(p[:, None] * x, 0)
        l_i = l_i * alpha + tl.sum(p, 0)
        m_i = m_new

    # Normalise and store.
    if sinks_ptr is not None:
        alpha, m_i, l_i = add_sink(tl.load(sinks_ptr + head), m_i, l_i, True)
        acc = acc * alpha
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    lse = m_i + tl.log(l_safe)
    row = (batch * tokens + token) * HEADS + head
    cols = tl.arange(0, BLOCK_DV)
    out = (acc / l_safe).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * HEAD_DIM_V + cols, out, mask=cols < HEAD_DIM_V)
    tl.store(lse_ptr + (batch * HEADS + head) * tokens + token, lse)


def merge_splits(
    outs: Tensor,
    lses: Tensor,
    out: Tensor,
    lse: Tensor,
    operands: DecodeOperands[Tensor] | PagedOperands[Tensor],
    spec: DecodeSpec,
    block_kv: int | None,
    backend: Backend,
) -> None:
    """Launch `combine_kernel` on the splits of a paged decode.

    `block_kv` is the decode's; None if every split has written its part, even without keys. On SM90
    the merge starts early, as the decode expects.
    """
    states = spec.merge(len(outs))
    sinks, seq_lens = operands.sinks, None if block_kv is None else operands.seq_lens
    launch_merge(outs, lses, sinks, seq_lens, out, lse, states, backend, spec, block_kv)


def launch_merge(
    outs: Tensor,
    lses: Tensor,
    sinks: Tensor | None,
    seq_lens: Tensor | None,
    out: Tensor,
    lse: Tensor,
    spec: MergeSpec,
    backend: Backend,
    decode: DecodeSpec | None = None,
    block_keys: int | None = None,
) -> None:
    overlap = decode is not None and backend.target == "sm90"
    launch(
        "combine",
        combine_kernel,
        _prepare,
        (outs, lses, sinks, seq_lens, out, lse),
        spec,
        backend,
        decode,
        block_keys,
        overlap,
        launch_pdl=overlap,
    )


def _prepare(call: KernelCall) -> Prepared:
    spec, (decode, block_keys, overlap) = call.spec, call.constants
    outs, lses, *_ = call.layouts
    return (spec.batch * spec.tokens * spec.heads,), {
        "outs_strides": strides_of_outputs(outs),
        "lses_strides": strides_of_lses(lses),
        "tokens": spec.tokens,
        "num_states": spec.num_states,
        "capacity": 0 if decode is None else decode.cache.capacity,
        "window_left": None if decode is None else decode.bounded_window.left,
        "HEADS": spec.heads,
        "HEAD_DIM_V": spec.head_dim_v,
        "BLOCK_DV": padded_head_dim(spec.head_dim_v),
        "BLOCK_KEYS": block_keys,
        "PDL": overlap,
    }
