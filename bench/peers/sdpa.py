"""`torch.nn.functional.scaled_dot_product_attention`, held to one of its backends.

FLASH_ATTENTION is FlashAttention-2, CUDNN_ATTENTION is cuDNN's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.calls import torch_call
from bench.job import Absent, Call
from bench.peers.limits import check_dense, check_flash
from interop.parity.cases import DecodeCase, FlashCase

if TYPE_CHECKING:
    from bench.suites.decode_inputs import DecodeTensors

FLASH_ATTENTION = "FLASH_ATTENTION"


def flash(backend: str, case: FlashCase, operation: str, tensors) -> Call:
    """A call of the backend, a name of `torch.nn.attention.SDPBackend`."""
    check_flash(case, rectangles=backend == FLASH_ATTENTION)
    attend = _attention(
        backend, case.causal, case.seq_q, case.seq_kv, case.scale, case.heads_q != case.heads_kv
    )
    return torch_call(attend, operation, tensors, heads_first=True)


def decode(backend: str, case: DecodeCase, tensors: DecodeTensors) -> Call:
    """A call of the backend on a dense copy of the cache, which is made beforehand."""
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
