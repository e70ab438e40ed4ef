"""`torch_attn` in place of PyTorch's own flash attention, on CUDA.

`activate` overrides the aten operators below `scaled_dot_product_attention`, `varlen_attn` and
nested tensors. Each override takes and returns what PyTorch's CUDA kernel does. Its positions are
aligned bottom-right: `scaled_dot_product_attention`, which aligns `is_causal` top-left, calls it
with `is_causal` only where Sq = Skv.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention
from torch.nn.functional import pad

from torch_attn.flash import flash_attention
from torch_attn.flash_ops import DENSE, PACKED, or_as_torch_says
from torch_attn.paged import paged_attention
from torch_attn.varlen import flash_attention_varlen
from twin_attention.contract.spec import HEAD_DIM_MIN
from twin_attention.contract.validate.errors import fail
from twin_attention.contract.validate.options import check_attention_options

NAME = "twin_attention"


def activate() -> ExitStack:
    """Run PyTorch's own attention functions with the kernels of `torch_attn`, on CUDA.

    It serves `scaled_dot_product_attention` and all that calls it (`nn.MultiheadAttention`,
    diffusers, timm, torchtitan), `torch.nn.attention.varlen` and nested tensors, forward and
    backward, eager and compiled, wherever PyTorch would run its flash attention: in 16 bits,
    without `attn_mask`. Other calls run what they ran before, but not cuDNN, which PyTorch prefers
    on some GPUs and which is off until `restore`. The arguments keep PyTorch's meaning; dropout
    drops other probabilities for the same `torch.manual_seed`.

    Returns:
        A context manager that activates what was active before when it exits. Without ``with``
        the kernels stay active until `restore`.

    Raises:
        NotImplementedError: this PyTorch cannot replace its flash attention (before 2.11). The
            functions themselves raise it, by the name of the argument, for what has no kernel:
            `return_debug_mask`, `alibi_slopes`, `seqused_k` without `block_table`, pages without a
            causal mask, or `num_splits` without pages.

    Example::

        import torch
        import torch_attn

        q, k, v = torch.randn(3, 1, 4, 128, 64)
        with torch_attn.activate():
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    """
    if not hasattr(attention, "register_flash_attention_impl"):
        expected = "a PyTorch with torch.nn.attention.register_flash_attention_impl (2.11 or newer)"
        fail(NotImplementedError, "activate", expected, torch.__version__)
    active = attention.current_flash_attention_impl()
    attention.register_flash_attention_impl(NAME, register_fn=override)
    attention.activate_flash_attention_impl(NAME)
    before = ExitStack()
    if active is None:
        before.callback(restore)
    else:
        before.callback(attention.activate_flash_attention_impl, active)
    return before


def restore() -> None:
    """Return to PyTorch's own flash attention; without effect if it is active."""
    attention.restore_flash_attention_impl(_raise_warn=False)


@dataclass
class Overrides:
    """The overrides in the dispatcher, as PyTorch holds them until another implementation's."""

    library: torch.library.Library | None
    had_cudnn: bool

    def remove(self) -> None:
        self.library = None  # its finalizer removes what it registered
        torch.backends.cuda.enable_cudnn_sdp(self.had_cudnn)


def override(device: str = "CUDA") -> Overrides:
    library = torch.library.Library("aten", "IMPL")
    for name, function in OVERRIDES.items():
        if hasattr(torch.ops.aten, name):
            library.impl(name, torch.no_grad()(function), device, allow_override=True)
    had_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    return Overrides(library, had_cudnn)


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    """Compute `aten._flash_attention_forward`: dense [B, S, H, D], packed [T, H, D], or paged."""
    if return_debug_mask:
        fail(NotImplementedError, "return_debug_mask", "False", return_debug_mask)
    if alibi_slopes is not None:
        fail(NotImplementedError, "alibi_slopes", "None (the backward takes none)", "a tensor")
    if value.shape[-1] != query.shape[-1]:
        fail(NotImplementedError, "value", "query's head dimension", value.shape[-1])
    window = _window(window_size_left), _window(window_size_right)
    options: dict[str, Any] = {"scale": _scale(query, scale), "window_size": window}
    if block_table is not None:
        if not is_causal and window[1] != 0 and max_q > 1:
            expected = "window_size_right=0 or is_causal=True with block_table"
            fail(NotImplementedError, "window_size_right", expected, window_size_right)
        if dropout_p > 0:
            fail(NotImplementedError, "dropout_p", "0.0 with block_table", dropout_p)
        if seqused_k is None or cum_seq_q is None:
            fail(ValueError, "block_table", "with it seqused_k and cum_seq_q", None)
        out, lse = paged_attention(
            query, key, value, block_table, seqused_k, cum_seq_q, num_splits=num_splits or None,
            return_lse=True, **options,
        )  # fmt: skip
        return out, lse, *_rest_of_results(query)
    if seqused_k is not None:
        fail(NotImplementedError, "seqused_k", "None without block_table", "a tensor")
    if num_splits is not None and num_splits > 1:
        fail(NotImplementedError, "num_splits", "None, 0 or 1 without block_table", num_splits)
    state, unused, mask = _rest_of_results(query, dropout_p)
    options |= {"causal": is_causal, "dropout_rate": dropout_p, "return_lse": True}
    options["dropout_seed"] = _seed(state, dropout_p)
    q, k, v = _padded(query, key, value)
    if cum_seq_q is None or cum_seq_k is None:
        out, lse = flash_attention(q, k, v, **options)
    else:
        out, lse = flash_attention_varlen(q, k, v, cum_seq_q, cum_seq_k, **options)
    return _as_laid_out(query, out), lse, state, unused, mask


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    window = _window(window_size_left), _window(window_size_right)
    function = DENSE if cum_seq_q is None else PACKED
    offsets = {} if cum_seq_q is None else {"cu_seqlens_q": cum_seq_q, "cu_seqlens_kv": cum_seq_k}
    q, k, v, out, grad_out = _padded(query, key, value, out, grad_out)
    operands = function.operands(q, k, v, **offsets, dropout_seed=_seed(rng_state, dropout_p))
    options = check_attention_options(
        is_causal, _scale(query, scale), window, None, or_as_torch_says(None), "ieee", dropout_p,
        False, False, True,
    )  # fmt: skip
    gradients = function.bwd(grad_out, None, *operands, out, logsumexp, None, "", *options, None)
    return tuple(map(_as_laid_out, (query, key, value), gradients))


def flash_forward_inplace(out: Tensor, *args: Any, **options: Any) -> Tensor:
    """Compute `aten._flash_attention_forward_no_dropout_inplace`: copy into `out`, return lse."""
    result, lse, *_ = flash_forward(*args, **options)
    out.copy_(result)
    return lse


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Compute `aten._scaled_dot_product_flash_attention`, [B, H, S, D]."""
    fold, unfold = _fold(dropout_p, query, key, value)
    q, k, v = map(fold, (query, key, value))
    sizes = query.shape[2], key.shape[2]
    out, lse, *aux = flash_forward(
        q, k, v, None, None, *sizes, dropout_p, is_causal, return_debug_mask, scale=scale
    )
    return unfold(out, query), lse.view(query.shape[:3]), None, None, *sizes, *aux


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    fold, unfold = _fold(dropout_p, query, key, value)
    dout, q, k, v, out = map(fold, (grad_out, query, key, value, out))
    lse = logsumexp.reshape(len(q), q.shape[2], q.shape[1])
    gradients = flash_backward(
        dout, q, k, v, out, lse, None, None, max_q, max_k, dropout_p, is_causal, philox_seed,
        philox_offset, scale=scale,
    )  # fmt: skip
    return tuple(map(unfold, gradients, (query, key, value)))


OVERRIDES: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_inplace,
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
}


def _fold(
    dropout_p: float, *qkv: Tensor
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """Return how to view [B, H, S, D] as [B, S, H, D], and a result as a tensor of the first shape.

    PyTorch's results lie in memory as their operands do, ours are contiguous. So where heads lie
    around positions, or positions around the batch, batch and heads become one axis, unless dropout
    counts them.
    """
    if dropout_p == 0 and all(x.stride(0) == x.shape[1] * x.stride(1) for x in qkv):
        if all(x.stride(1) < x.stride(2) for x in qkv):
            return (
                lambda x: x.flatten(0, 1).transpose(0, 1).unsqueeze(0),
                lambda y, x: y.squeeze(0).transpose(0, 1).unflatten(0, x.shape[:2]),
            )
        if all(x.stride(1) >= x.stride(2) and x.shape[1] == qkv[0].shape[1] for x in qkv):
            return lambda x: x.flatten(0, 1).unsqueeze(2), lambda y, x: y.view(x.shape)
    return lambda x: x.transpose(1, 2), lambda y, _: y.transpose(1, 2)


def _as_laid_out(like: Tensor, x: Tensor) -> Tensor:
    """Return a result without its padding and in the memory order of an operand.

    It is copied if it has another one: a compiled program relies on the order.
    """
    x = x[..., : like.shape[-1]]
    strides = torch.empty_like(like, device="meta").stride()
    if all(n < 2 or a == b for n, a, b in zip(x.shape, x.stride(), strides, strict=True)):
        return x
    return x.new_empty_strided(x.shape, strides).copy_(x)


def _padded(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors with the smallest head dimension that has kernels, if theirs is smaller."""
    missing = HEAD_DIM_MIN - tensors[0].shape[-1]
    return tuple(pad(x, (0, missing)) for x in tensors) if missing > 0 else tensors


def _scale(query: Tensor, scale: float | None) -> float | None:
    return query.shape[-1] ** -0.5 if scale is None and query.shape[-1] else scale


def _window(side: int | None) -> int | None:
    return None if side is None or side < 0 else side


def _rest_of_results(query: Tensor, dropout_p: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the state of dropout's generator, in place of its offset and mask nothing."""
    if dropout_p > 0:
        state = torch.randint(-(2**31), 2**31, (4,), dtype=torch.int32, device=query.device)
        state = state.view(torch.uint64)
    else:
        state = torch.empty((2,), dtype=torch.uint64, device=query.device)
    return state, state.new_empty(()), query.new_empty(0)


def _seed(state: Tensor, dropout_p: float) -> Tensor | None:
    return state.view(torch.int32)[:2] if dropout_p > 0 else None
