"""Attention over packed sequences by other libraries: from offsets, by a mask, or padded.

A factory takes (case, operation, tensors), with torch's q, k, v and dout [T, H, D].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.calls import as_torch, compiled, jax_call, torch_call
from bench.job import Absent, Call
from bench.peers.limits import HALF, check_head_dims, check_packed, load
from bench.peers.sparse_peers import flex_mask
from bench.problems import document_lengths, offsets_of
from twin_attention.interop.parity.cases import FlashCase, VarlenCase

if TYPE_CHECKING:
    from torch import Tensor

FLEX_TILE = 128  # queries, and keys, of FlexAttention's tiles
SCORES_MAX = 1 << 35  # bytes of float32 scores; beside them there are masks and probabilities
# Arrays of the scores' size at once; a backward has gradients of scores and probabilities too.
ARRAYS = {"forward": 1, "backward": 4}


def fa2_varlen(case: VarlenCase, operation: str, tensors) -> Call:
    """torch's FlashAttention-2, as `torch.nn.attention.varlen` calls it."""
    check_packed(case)
    attend = _aten()._flash_attention_forward
    offsets, longest = offsets_of(case, tensors[0].device), max(document_lengths(case))

    def forward(q, k, v):
        ends = (offsets, offsets, longest, longest)
        return attend(q, k, v, *ends, 0.0, case.causal, False, scale=case.scale)[0]

    return torch_call(forward, operation, tensors)


def fa3_varlen(case: VarlenCase, operation: str, tensors) -> Call:
    """FlashAttention-3's kernels for Hopper, from the package fa3-fwd."""
    check_packed(case, dtypes=("bfloat16",))
    if operation != "forward":
        raise Absent("its package has the forward alone")
    attend = getattr(load("fa3_fwd_interface"), "flash_attn_varlen_func", None)
    if attend is None:
        raise Absent("its package has no flash_attn_varlen_func")
    return _flash_attn_varlen(attend, case, operation, tensors)


def fa4_varlen(case: VarlenCase, operation: str, tensors) -> Call:
    """FlashAttention-4's kernels in CuTe, from the package flash-attn-4."""
    check_packed(case)
    check_head_dims(case)
    attend = load("flash_attn.cute").flash_attn_varlen_func
    return _flash_attn_varlen(attend, case, operation, tensors)


def flex(case: VarlenCase, operation: str, tensors) -> Call:
    """Compiled FlexAttention with a premade block mask of documents."""
    check_packed(case, dtypes=(*HALF, "float32"))
    from torch.nn.attention.flex_attention import flex_attention

    mask = document_mask(case, tensors[0].device)
    attention = compiled(flex_attention)

    def attend(q, k, v):
        grouped = case.heads_q != case.heads_kv
        return attention(q, k, v, block_mask=mask, scale=case.scale, enable_gqa=grouped)

    call = torch_call(attend, operation, [x[None] for x in tensors], heads_first=True)
    return _converted(call, lambda x: x[0])


def document_mask(case: VarlenCase, device: Any) -> Any:
    document = _documents(case, device)
    numbers = document.cpu().numpy()
    ends = np.arange(FLEX_TILE, len(numbers) + FLEX_TILE, FLEX_TILE)
    first, last = numbers[ends - FLEX_TILE], numbers[np.minimum(ends, len(numbers)) - 1]
    kept = (first[:, None] <= last) & (last[:, None] >= first)
    alone = (first == last) & (ends <= len(numbers))
    whole = kept & alone[:, None] & alone
    if case.causal:
        kept, whole = np.tril(kept), np.tril(whole, -1)

    def visible(batch, head, query, key):
        seen = document[query] == document[key]
        return seen & (query >= key) if case.causal else seen

    tile, lengths = (FLEX_TILE, FLEX_TILE), (len(numbers), len(numbers))
    return flex_mask(kept, whole, tile, lengths, visible, device)


def jax_masked(case: VarlenCase, operation: str, tensors) -> Call:
    """XLA's attention in `jax.nn` over all tokens, with a mask of documents."""
    check_packed(case)
    tokens = len(tensors[0])
    if (scores := ARRAYS[operation] * 4 * case.heads_q * tokens**2) > SCORES_MAX:
        raise Absent(f"its scores would take {scores >> 30} GiB")
    import jax

    from twin_attention.interop.exchange import to_jax

    document = to_jax(_documents(case, tensors[0].device))

    def attend(q, k, v):
        mask = (document[:, None] == document[None, :])[None, None]
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask, scale=case.scale, is_causal=case.causal, implementation="xla"
        )

    call = jax_call(attend, operation, [x[None] for x in tensors])
    return _converted(call, lambda x: x[0])


def padded(
    factory: Callable[..., Call], case: VarlenCase, operation: str, tensors: Sequence[Tensor]
) -> Call:
    """A flash peer on the documents, padded to the longest one.

    The batch is premade, its length a multiple of 64. Padding comes last, where causal rows do not
    see it; its gradient is 0.
    """
    check_packed(case)
    if not case.causal:
        raise Absent("without a causal mask it would see padding")
    import torch

    lengths = torch.tensor(document_lengths(case), device=tensors[0].device)
    batch, longest = len(lengths), -(-max(document_lengths(case)) // 64) * 64
    is_token = torch.arange(longest, device=lengths.device) < lengths[:, None]

    def pad(x: Tensor) -> Tensor:
        rows = x.new_zeros(batch, longest, *x.shape[1:])
        rows[is_token] = x
        return rows

    dense = FlashCase(
        case.name, batch, longest, longest, case.heads_q, case.heads_kv, case.head_dim,
        case.head_dim_v, case.dtype, case.causal, case.scale,
    )  # fmt: skip
    call = factory(dense, operation, [pad(x) for x in tensors])
    return _converted(call, lambda x: as_torch(x)[is_token])


def _flash_attn_varlen(
    attend: Callable[..., Any], case: VarlenCase, operation: str, tensors: Sequence[Tensor]
) -> Call:
    """A package's `flash_attn_varlen_func`, which may return more than out."""
    offsets, longest = offsets_of(case, tensors[0].device), max(document_lengths(case))
    attend = partial(
        attend, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest,
        max_seqlen_k=longest, softmax_scale=case.scale, causal=case.causal,
    )  # fmt: skip

    def forward(q, k, v):
        out = attend(q, k, v)
        return out[0] if isinstance(out, tuple) else out

    return torch_call(forward, operation, tensors)


def _aten() -> Any:
    """Return torch's own operators."""
    import torch

    return torch.ops.aten


def _documents(case: VarlenCase, device: Any) -> Tensor:
    """Return each token's document, [T] int32."""
    import torch

    lengths = torch.tensor(document_lengths(case), device=device)
    numbers = torch.arange(len(lengths), dtype=torch.int32, device=device)
    return numbers.repeat_interleave(lengths)


def _converted(call: Call, convert: Callable[[Any], Any]) -> Call:
    result = call.result
    assert result is not None
    return call._replace(result=lambda found: [convert(x) for x in result(found)])
