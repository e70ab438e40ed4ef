"""The gradients of a merge of attention over disjoint sets of keys.

With ``w = softmax(lses)`` and ``dp_n = dout · out_n``: ``d out_n = w_n dout`` and
``d lse_n = w_n (dp_n - Σ_m w_m dp_m + dlse)``.
"""

import triton
import triton.language as tl
from torch import Tensor

from torch_attn.kernels.library.pages import (
    load_rows_at,
    store_rows_at,
    strides_of_lses,
    strides_of_outputs,
)
from torch_attn.kernels.library.softmax import LOG2E
from torch_attn.launch import KernelCall, Prepared, launch
from twin_attention.contract.spec import MergeSpec
from twin_attention.targets.config import padded_head_dim
from twin_attention.targets.family import Backend


@triton.jit
def _load_lse(lses_ptr, part, num_states, stride):
    return tl.load(lses_ptr + part * stride, mask=part < num_states, other=float("-inf"))


@triton.jit
def combine_bwd_kernel(
    dout_ptr, dlse_ptr, outs_ptr, lses_ptr, douts_ptr, dlses_ptr, dout_strides, dlse_strides,
    outs_strides, lses_strides, tokens, rows, num_states, HEADS: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_STATES: tl.constexpr,
):  # fmt: skip
    """One program computes the gradients of one row of all parts.

    Operands: those of `combine_kernel`; dout [B, S, H, Dv] and dlse [B, H, S] (float32) or None,
    with the given strides; douts and dlses like outs and lses, contiguous, `rows` rows a part. Grid
    and accumulation: as there. A part whose lse is -inf has gradients 0.
    """
    # Locate the row.
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    token = (tl.program_id(0) // HEADS % tokens).to(tl.int64)
    batch = (tl.program_id(0) // HEADS // tokens).to(tl.int64)
    outs_ptr += batch * outs_strides.batch + token * outs_strides.token + head * outs_strides.head
    lses_ptr += batch * lses_strides.batch + head * lses_strides.head + token * lses_strides.token
    dout_ptr += batch * dout_strides.batch + token * dout_strides.token + head * dout_strides.head
    douts_ptr += ((batch * tokens + token) * HEADS + head) * HEAD_DIM_V
    dlses_ptr += (batch * HEADS + head) * tokens + token

    # Sum the parts' exponentials.
    m_i = float("-inf")
    l_i = 0.0
    for start in tl.range(0, num_states, BLOCK_STATES):
        part = start + tl.arange(0, BLOCK_STATES).to(tl.int64)
        s = _load_lse(lses_ptr, part, num_states, lses_strides.state)
        m_new = tl.maximum(m_i, tl.max(s, 0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        l_i = l_i * tl.exp2((m_i - m_safe) * LOG2E) + tl.sum(tl.exp2((s - m_safe) * LOG2E), 0)
        m_i = m_new
    m_safe = tl.where(m_i == float("-inf"), 0.0, m_i)
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)

    # d out_n = w_n dout; d lse_n's memory holds dp_n until Σ w dp is known.
    cols = tl.arange(0, BLOCK_DV)
    dout = tl.load(dout_ptr + cols, mask=cols < HEAD_DIM_V, other=0.0).to(tl.float32)
    delta = 0.0
    for start in tl.range(0, num_states, BLOCK_STATES):
        part = start + tl.arange(0, BLOCK_STATES).to(tl.int64)
        is_part = part < num_states
        s = _load_lse(lses_ptr, part, num_states, lses_strides.state)
        w = tl.exp2((s - m_safe) * LOG2E) / l_safe
        x = load_rows_at(outs_ptr, (part,), outs_strides, is_part, HEAD_DIM_V, BLOCK_DV)
        x = tl.where((s > float("-inf"))[:, None], x.to(tl.float32), 0.0)
        dp = tl.sum(x * dout[None, :], 1)
        delta += tl.sum(w * dp, 0)
        store_rows_at(
            douts_ptr, w[:, None] * dout[None, :], (part * rows,), (HEAD_DIM_V,), is_part,
            HEAD_DIM_V, BLOCK_DV,
        )  # fmt: skip
        tl.store(dlses_ptr + part * rows, dp, mask=is_part)
    if dlse_ptr is not None:
        dlse_ptr += (
            batch * dlse_strides.batch + head * dlse_strides.head + token * dlse_strides.token
        )
        delta -= tl.load(dlse_ptr)
    tl.debug_barrier()  # the threads read values that others wrote

    # d lse_n = w_n (dp_n - Σ w dp + dlse)
    for start in tl.range(0, num_states, BLOCK_STATES):
        part = start + tl.arange(0, BLOCK_STATES).to(tl.int64)
        is_part = part < num_states
        s = _load_lse(lses_ptr, part, num_states, lses_strides.state)
        w = tl.exp2((s - m_safe) * LOG2E) / l_safe
        dp = tl.load(dlses_ptr + part * rows, mask=is_part, other=0.0)
        tl.store(dlses_ptr + part * rows, w * (dp - delta), mask=is_part)


def combine_bwd(
    dout: Tensor, dlse: Tensor | None, outs: Tensor, lses: Tensor, spec: MergeSpec, backend: Backend
) -> tuple[Tensor, Tensor]:
    douts, dlses = outs.new_empty(outs.shape), lses.new_empty(lses.shape)
    operands = (dout, dlse, outs, lses, douts, dlses)
    launch("combine", combine_bwd_kernel, _prepare, operands, spec, backend)
    return douts, dlses


def _prepare(call: KernelCall) -> Prepared:
    spec = call.spec
    dout, dlse, outs, lses, *_ = call.layouts
    return (spec.batch * spec.tokens * spec.heads,), {
        "dout_strides": strides_of_outputs(dout),
        "dlse_strides": None if dlse is None else strides_of_lses(dlse),
        "outs_strides": strides_of_outputs(outs),
        "lses_strides": strides_of_lses(lses),
        "tokens": spec.tokens,
        "rows": spec.batch * spec.tokens * spec.heads,
        "num_states": spec.num_states,
        "HEADS": spec.heads,
        "HEAD_DIM_V": spec.head_dim_v,
        "BLOCK_DV": padded_head_dim(spec.head_dim_v),
    }
