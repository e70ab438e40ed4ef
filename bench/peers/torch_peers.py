"""Attention in torch: eager, FlexAttention, and `scaled_dot_product_attention` by backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from bench.calls import compiled, torch_call
from bench.job import Absent, Call
from bench.peers.limits import HALF, check_dense, check_flash, check_head_dims, load
from bench.problems import DecodeTensors
from twin_attention.interop.parity.cases import DecodeCase, FlashCase

FLASH_ATTENTION = "FLASH_ATTENTION"  # FlashAttention-2; CUDNN_ATTENTION is cuDNN's
# Memory-efficient attention always multiplies float32 by three TF32 products.
EFFICIENT_ATTENTION = "EFFICIENT_ATTENTION"


def eager(case: FlashCase, operation: str, tensors) -> Call:
    """Compute ``softmax(scale · q kᵀ) v`` in the inputs' dtype; the causal mask is premade."""
    check_flash(case, dtypes=(*HALF, "float32"), rectangles=True)
    import torch

    spec = case.spec
    hidden = None
    if case.causal:
        shape = (spec.seq_q, spec.seq_kv)
        hidden = torch.ones(shape, dtype=torch.bool, device=tensors[0].device)
        hidden = hidden.triu(spec.diagonal + 1)

    def attend(q, k, v):
        if spec.group_size > 1:
            k, v = (x.repeat_interleave(spec.group_size, dim=1) for x in (k, v))
        s = (q @ k.transpose(2, 3)) * spec.scale
        if hidden is not None:
            s = s.masked_fill(hidden, float("-inf"))
        return s.softmax(dim=-1) @ v

    return torch_call(attend, operation, tensors, heads_first=True)


def flex(case: FlashCase, operation: str, tensors) -> Call:
    """Compiled FlexAttention with a premade causal block mask."""
    check_flash(case, dtypes=(*HALF, "float32"), rectangles=True)
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    diagonal = case.spec.diagonal

    def visible(batch, head, query, key):
        return query + diagonal >= key

    mask = None
    if case.causal:
        device = tensors[0].device
        mask = create_block_mask(visible, None, None, case.seq_q, case.seq_kv, device)
    attend = partial(
        compiled(flex_attention),
        block_mask=mask,
        scale=case.scale,
        enable_gqa=case.heads_q != case.heads_kv,
    )
    return torch_call(attend, operation, tensors, heads_first=True)


def sdpa(backend: str, case: FlashCase, operation: str, tensors) -> Call:
    """The backend of this name of `torch.nn.attention.SDPBackend`."""
    dtypes = (*HALF, "float32") if backend == EFFICIENT_ATTENTION else HALF
    check_flash(case, dtypes=dtypes, rectangles=backend == FLASH_ATTENTION)
    attend = _attention(
        backend, case.causal, case.seq_q, case.seq_kv, case.scale, case.heads_q != case.heads_kv
    )
    return torch_call(attend, operation, tensors, heads_first=True)


def fa3(case: FlashCase, operation: str, tensors) -> Call:
    """As `packed_peers.fa3_varlen`."""
    check_flash(case, dtypes=("bfloat16",), rectangles=True)
    if operation != "forward":
        raise Absent("its package has the forward alone")
    attend = load("fa3_fwd_interface").flash_attn_func
    attend = partial(attend, softmax_scale=case.scale, causal=case.causal)
    return torch_call(attend, operation, tensors)


def fa4(case: FlashCase, operation: str, tensors) -> Call:
    """As `packed_peers.fa4_varlen`."""
    check_flash(case, rectangles=True)
    check_head_dims(case)
    attend = load("flash_attn.cute").flash_attn_func

    def forward(q, k, v):
        out, _ = attend(q, k, v, softmax_scale=case.scale, causal=case.causal)
        return out

    return torch_call(forward, operation, tensors)


def sdpa_by_default(
    case: FlashCase, operation: str, tensors, wrap: Callable[[Any], Any] = lambda attend: attend
) -> Call:
    """The backend that torch chooses; `wrap` may compile it."""
    check_flash(case, dtypes=(*HALF, "float32"), groups=False)
    from torch.nn.functional import scaled_dot_product_attention

    attend = partial(scaled_dot_product_attention, is_causal=case.causal, scale=case.scale)
    return torch_call(wrap(attend), operation, tensors, heads_first=True)


def sdpa_operator(
    backend: Literal["flash", "cudnn"], case: FlashCase, operation: str, tensors
) -> Call:
    """The operator behind torch's SDPA, for host times: `sdpa_kernel` takes as long as it does."""
    check_flash(case, groups=False)
    import torch

    operator = getattr(torch, f"_scaled_dot_product_{backend}_attention")
    options: dict[str, Any] = {"is_causal": case.causal, "scale": case.scale}
    if backend == "cudnn":
        options |= {"attn_bias": None, "compute_log_sumexp": operation != "forward"}

    def attend(q, k, v):
        return operator(q, k, v, **options)[0]

    return torch_call(attend, operation, tensors, heads_first=True)


def sdpa_decode(backend: str, case: DecodeCase, tensors: DecodeTensors) -> Call:
    """The backend on a premade dense copy of the cache."""
    check_dense(case)
    spec, length = case.spec, case.lengths[0]
    causal = spec.tokens > 1
    if causal and backend != FLASH_ATTENTION:
        raise Absent("its causal mask is aligned to the first query and key")
    attend = _attention(backend, causal, spec.tokens, length, case.scale, spec.group_size > 1)
    q = tensors.q.view(spec.batch, spec.tokens, spec.heads_q, spec.head_dim)
    q, k, v = (x.transpose(1, 2) for x in (q, *tensors.dense))
    return Call(lambda: attend(q, k, v), lambda out: (out.transpose(1, 2),))


def _attention(
    backend: str, causal: bool, seq_q: int, seq_kv: int, scale: float | None, grouped: bool
):
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    square = seq_q == seq_kv
    options = {
        "attn_mask": causal_lower_right(seq_q, seq_kv) if causal and not square else None,
        "is_causal": causal and square,
        "scale": scale,
        "enable_gqa": grouped,
    }
    only = getattr(SDPBackend, backend)

    def attend(q, k, v):
        with sdpa_kernel(only):
            return scaled_dot_product_attention(q, k, v, **options)

    return attend
