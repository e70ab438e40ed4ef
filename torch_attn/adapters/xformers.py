"""The signature of xformers' `memory_efficient_attention` on `torch_attn`.

Masks are known by the names of their classes: xformers itself is not imported. A mask or an
argument that `torch_attn` has no code for is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_attn import flash_attention, flash_attention_varlen
from torch_attn.adapters.seeds import draw_seed
from torch_attn.operands import check_tensor
from twin_attention.contract.validate.errors import fail

MASKS = (
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionMask",
    "BlockDiagonalCausalMask",
    "BlockDiagonalMask",
    "LocalAttentionFromBottomRightMask",
    "LowerTriangularFromBottomRightLocalAttentionMask",
    "LowerTriangularFromBottomRightMask",
    "LowerTriangularMask",
    "LowerTriangularMaskWithTensorBias",
)


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute what `xformers.ops.memory_efficient_attention` computes, with `torch_attn`.

    No argument changes its meaning: `LowerTriangularMask` is top-left there and here. Nothing is
    copied; keys that are expanded over the heads of a group are read once.

    Args:
        query: [B, M, H, K], [B, M, K] for one head, or [B, M, G, H, K] for H heads that share each
            of G kv heads; float16, bfloat16 or float32. K is 16 to 512 in steps of 8.
        key: [B, N, H, K], likewise, query's dtype.
        value: [B, N, H, Kv], likewise, query's dtype.
        attn_bias: None, a tensor [B, H, M, N] ([B, M, N] for one head), or a mask of xformers: a
            `LowerTriangular...`, `LocalAttention...` or `BlockDiagonal...` one without padded,
            gappy or paged keys. Blocks lie one after the other in a batch of 1.
        p: share of probabilities to drop. The seed comes from torch's generator of the device, as
            there, but drops others.
        scale: factor of the scores; None is ``K ** -0.5``.
        op: None.
        output_dtype: None, or query's.

    Returns:
        out, query's shape with Kv last, in query's dtype.

    Raises:
        NotImplementedError: another mask, top-left causal blocks with other numbers of keys than of
            queries, a tensor as bias of five dimensions, `op`, or another `output_dtype`.
        ValueError: a mask of blocks with a batch other than 1, or tensors of other ranks. What
            `torch_attn.flash_attention` raises.

    Source: Rabe and Staats 2021; Lefaudeux et al. 2022 (xformers).

    Example::

        import torch
        from torch_attn.adapters.xformers import memory_efficient_attention

        q, k, v = torch.randn(3, 1, 128, 4, 64)
        out = memory_efficient_attention(q, k, v, p=0.1)
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.ndim != query.ndim or not 3 <= x.ndim <= 5:
            expected = "[B, M, H, K], [B, M, K] or [B, M, G, H, K], alike for all three"
            fail(ValueError, name, expected, f"shape {tuple(x.shape)}")
    if op is not None:
        fail(NotImplementedError, "op", "None", op)
    if output_dtype not in (None, query.dtype):
        fail(NotImplementedError, "output_dtype", f"None or query's {query.dtype}", output_dtype)
    mask = type(attn_bias).__name__
    if not (attn_bias is None or isinstance(attn_bias, Tensor) or mask in MASKS):
        expected = f"None, a tensor, or one of {', '.join(MASKS)}"
        fail(NotImplementedError, "attn_bias", expected, mask)
    causal = "Causal" in mask or "LowerTriangular" in mask
    is_top_left = causal and "BottomRight" not in mask
    q, k, v = _heads(query), _heads(key), _heads(value)
    options: dict[str, Any] = {
        "scale": scale, "window_size": _window(attn_bias), "dropout_rate": p,
        "dropout_seed": draw_seed(q, p),
    }  # fmt: skip
    if mask.startswith("BlockDiagonal"):
        offsets = _offsets(attn_bias, q, is_top_left)
        q, k, v = q.squeeze(0), k.squeeze(0), v.squeeze(0)
        out = flash_attention_varlen(q, k, v, *offsets, causal=causal, **options)
    else:
        bias = _bias(attn_bias, query)
        if is_top_left:
            # No query sees keys past the number of queries.
            more_queries = q.shape[1] - k.shape[1]
            k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
            bias = None if bias is None else bias[..., : q.shape[1]]
            if more_queries > 0:
                causal, options["window_size"] = False, (None, more_queries)
        out = flash_attention(q, k, v, causal=causal, bias=bias, **options)
    return out.view(*query.shape[:-1], value.shape[-1])


def _heads(x: Tensor) -> Tensor:
    """Return a tensor [B, M, H, K], with one head of a group if they are expanded."""
    if x.ndim == 3:
        return x.unsqueeze(2)
    if x.ndim == 5:
        return x[:, :, :, 0] if x.stride(3) == 0 else x.flatten(2, 3)
    return x


def _window(mask: Any) -> tuple[int | None, int | None]:
    size = getattr(mask, "_window_size", None)  # counts the query itself
    if size is not None:
        return size - 1, None
    return getattr(mask, "window_left", None), getattr(mask, "window_right", None)


def _offsets(mask: Any, q: Tensor, is_top_left: bool) -> tuple[Tensor, Tensor]:
    of_q, of_k = mask.q_seqinfo, mask.k_seqinfo
    if len(q) != 1:
        fail(ValueError, "query", "a batch of 1 with blocks", len(q))
    if is_top_left and of_q.seqstart_py != of_k.seqstart_py:
        expected = "blocks with as many keys as queries, or a ...FromBottomRightMask"
        fail(NotImplementedError, "attn_bias", expected, type(mask).__name__)
    return of_q.seqstart.to(q.device), of_k.seqstart.to(q.device)


def _bias(attn_bias: Any, query: Tensor) -> Tensor | None:
    """Return the tensor that is added to scores, with 1 in place of expanded dimensions."""
    bias = attn_bias if isinstance(attn_bias, Tensor) else getattr(attn_bias, "_bias", None)
    if bias is None:
        return None
    if query.ndim == 5:
        fail(NotImplementedError, "attn_bias", "no tensor with groups of heads", "a tensor")
    if query.ndim == 3:
        bias = bias.unsqueeze(1)
    for axis, stride in enumerate(bias.stride()):
        bias = bias.narrow(axis, 0, 1) if stride == 0 and bias.shape[axis] > 1 else bias
    return bias
