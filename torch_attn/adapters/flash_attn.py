"""The signatures of flash-attn 2.8 on `torch_attn`.

An argument that `torch_attn` has no code for is refused by name; none is ignored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_attn import append_kv, flash_attention, flash_attention_varlen, paged_decode
from torch_attn.adapters.seeds import draw_seed
from torch_attn.operands import check_tensor, strides_in_memory
from twin_attention.contract.paged_spec import PAGE_SIZE_MAX
from twin_attention.contract.validate.errors import fail


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor:
    """Compute what `flash_attn.flash_attn_func` computes, with `torch_attn.flash_attention`.

    No argument changes its meaning: both align positions bottom-right.

    Args:
        q: [B, Sq, Hq, D], float16, bfloat16 or float32. The last dimension is contiguous, and D is
            16 to 512 in steps of 8; flash-attn copies and pads others.
        k: [B, Skv, Hkv, D], q's dtype.
        v: [B, Skv, Hkv, Dv], q's dtype.
        dropout_p: share of probabilities to drop. The seed comes from torch's generator of the
            device, as there, but drops others.
        softmax_scale: factor of the scores; None is ``D ** -0.5``.
        causal: query i sees keys up to ``p = i + Skv - Sq``.
        window_size: (left, right), keys from p - left to p + right; -1 is unlimited.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0.0 leaves them.
        alibi_slopes: [Hq] or [B, Hq] float32: ``alibi_slopes * |p - j|`` is subtracted from scores.
            Not with a softcap, before which it counts here and after which there.
        deterministic: the backward gives the same bits every time.
        return_attn_probs: False. `torch_attn.flash_attention` returns the log-sum-exp.

    Returns:
        out [B, Sq, Hq, Dv] in q's dtype.

    Raises:
        NotImplementedError: ALiBi with a softcap, or probabilities.
        What `torch_attn.flash_attention` raises.

    Example::

        import torch
        from torch_attn.adapters.flash_attn import flash_attn_func

        q, k, v = torch.randn(3, 1, 128, 4, 64)
        out = flash_attn_func(q, k, v, causal=True, window_size=(31, -1))
    """
    _no_probabilities(return_attn_probs)
    _no_softcap(alibi_slopes, softcap)
    return flash_attention(
        q,
        k,
        v,
        causal=causal,
        scale=softmax_scale,
        window_size=_window(window_size),
        softcap=_softcap(softcap),
        alibi_slopes=alibi_slopes,
        dropout_rate=dropout_p,
        dropout_seed=draw_seed(q, dropout_p),
        deterministic=deterministic,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
) -> Tensor:
    """Compute what `flash_attn.flash_attn_varlen_func` computes, with `flash_attention_varlen`.

    Tokens past the last offset, which flash-attn leaves as they are, give 0.

    Args:
        q: [Tq, Hq, D], as in `flash_attn_func`.
        k: [Tkv, Hkv, D], q's dtype.
        v: [Tkv, Hkv, Dv], q's dtype.
        cu_seqlens_q, cu_seqlens_k: [N + 1] int32, offsets of the sequences' queries and keys.
        max_seqlen_q, max_seqlen_k: any; the kernels do not need the longest lengths.
        alibi_slopes: [Hq] or [N, Hq] float32, as in `flash_attn_func`.
        dropout_p, softmax_scale, causal, window_size, softcap, deterministic: as in
            `flash_attn_func`, within each sequence.
        return_attn_probs: False. `torch_attn.flash_attention_varlen` returns the log-sum-exp.
        block_table: None.

    Returns:
        out [Tq, Hq, Dv] in q's dtype.

    Raises:
        NotImplementedError: ALiBi with a softcap, pages or probabilities.
        What `torch_attn.flash_attention_varlen` raises.

    Example::

        import torch
        from torch_attn.adapters.flash_attn import flash_attn_varlen_func

        q, k, v = torch.randn(3, 100, 4, 64)
        offsets = torch.tensor([0, 40, 100], dtype=torch.int32)
        out = flash_attn_varlen_func(q, k, v, offsets, offsets, 60, 60, causal=True)
    """
    del max_seqlen_q, max_seqlen_k
    _no_probabilities(return_attn_probs)
    _no_softcap(alibi_slopes, softcap)
    _absent(block_table=block_table)
    return flash_attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        causal=causal,
        scale=softmax_scale,
        window_size=_window(window_size),
        softcap=_softcap(softcap),
        alibi_slopes=alibi_slopes,
        dropout_rate=dropout_p,
        dropout_seed=draw_seed(q, dropout_p),
        deterministic=deterministic,
    )


def flash_attn_qkvpacked_func(qkv: Tensor, *options: Any, **named: Any) -> Tensor:
    """Call `flash_attn_func` with q, k and v of one tensor, without a copy.

    Args:
        qkv: [B, S, 3, H, D].
        options, named: the arguments of `flash_attn_func` after v, in its order.

    Returns:
        out [B, S, H, D].

    Raises:
        ValueError: qkv has another shape. What `flash_attn_func` raises.

    Example::

        import torch
        from torch_attn.adapters.flash_attn import flash_attn_qkvpacked_func

        out = flash_attn_qkvpacked_func(torch.randn(1, 128, 3, 4, 64), causal=True)
    """
    q, k, v = _unpacked("qkv", qkv, 3, 5)
    return flash_attn_func(q, k, v, *options, **named)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Tensor:
    """Call `flash_attn_func` with k and v of one tensor [B, Skv, 2, Hkv, D], without a copy."""
    k, v = _unpacked("kv", kv, 2, 5)
    return flash_attn_func(q, k, v, *options, **named)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *options: Any, **named: Any
) -> Tensor:
    """Call `flash_attn_varlen_func` with q, k and v of one tensor [T, 3, H, D], without a copy."""
    q, k, v = _unpacked("qkv", qkv, 3, 4)
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(q, k, v, *lengths, *options, **named)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Tensor:
    """Call `flash_attn_varlen_func` with k and v of one tensor [Tkv, 2, Hkv, D], without a copy."""
    k, v = _unpacked("kv", kv, 2, 4)
    return flash_attn_varlen_func(q, k, v, *options, **named)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the tokens of a padded batch, as `flash_attn.bert_padding.unpad_input` does.

    It waits for the device. Gradients of the padding are 0.

    Args:
        hidden_states: [B, S, ...].
        attention_mask: [B, S], bool or integer, nonzero for tokens.
        unused_mask: [B, S], nonzero for tokens that are packed as well, but not counted in the last
            result.

    Returns:
        The packed tokens [T, ...]; their places [T] in the flattened batch, for `pad_input`; the
        offsets of the sequences [B + 1] int32; the longest length; and each sequence's number of
        tokens [B] int32, without unused ones.

    Example::

        import torch
        from torch_attn.adapters.flash_attn import flash_attn_varlen_func, pad_input, unpad_input

        x, mask = torch.randn(2, 8, 4, 16), torch.ones(2, 8).tril(5)
        tokens, places, offsets, longest, _ = unpad_input(x, mask)
        lengths = offsets, offsets, longest, longest
        out = pad_input(flash_attn_varlen_func(tokens, tokens, tokens, *lengths), places, 2, 8)
    """
    used = attention_mask != 0
    kept = used if unused_mask is None else used | (unused_mask != 0)
    lengths = kept.sum(-1, dtype=torch.int32)
    places = kept.flatten().nonzero().flatten()
    offsets = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    tokens = hidden_states.flatten(0, 1)[places]
    return tokens, places, offsets, int(lengths.max()), used.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return packed tokens [T, ...] to their places in [batch, seqlen, ...], 0 elsewhere."""
    padded = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute what `flash_attn.flash_attn_with_kvcache` computes, with `torch_attn.paged_decode`.

    A dense cache is read as pages of the largest size, up to 256, that divides S and the distance
    between its sequences, or of one slot with `cache_leftpad`; nothing is copied. Small pages are
    slower. `append_kv` first writes k and v into the cache in place, and rotates k and q.

    Args:
        q: [B, T, Hq, D], T from 1 to 64, float16 or bfloat16.
        k_cache: [B, S, Hkv, D], or with `block_table` [P, page_size, Hkv, D], page_size 1 to 256;
            q's dtype. A dense cache may be S slots of a longer one. With `cache_batch_idx` it has
            any number of sequences.
        v_cache: [B, S, Hkv, Dv] or [P, page_size, Hkv, Dv], q's dtype.
        k: [B, T_new, Hkv, D], T_new up to 64, new keys to append, or None.
        v: [B, T_new, Hkv, Dv], given where k is.
        rotary_cos, rotary_sin: [positions, R / 2], q's dtype or float32: rotate k and q, of the
            same tokens, at their positions. Only with k.
        cache_seqlens: [B] int32 or an int, the keys in the cache **before** k is appended. None is
            a full cache.
        cache_batch_idx: [B] int32, the sequence of a dense cache that each of q's has.
        cache_leftpad: [B] int32, the slot of a dense cache where each sequence begins. Lengths and
            rotated positions count from slot 0.
        alibi_slopes: [Hq] or [B, Hq] float32, as in `flash_attn_func`.
        block_table: [B, max_pages] int32, ids of pages.
        causal: with T above 1 it is True, or `window_size` ends in 0, which means the same.
        window_size: (left, right), a token sees keys from p - left on; -1 is unlimited.
        softmax_scale, softcap: as in `flash_attn_func`.
        rotary_interleaved: pairs are dimensions 2i and 2i + 1, not i and i + R / 2.
        num_splits: parts, up to 256, that each sequence's keys are divided into; 0 chooses.
        return_softmax_lse: return the log-sum-exp as well.

    Returns:
        out [B, T, Hq, Dv] in q's dtype; with `return_softmax_lse` the pair (out, lse), lse [B, Hq,
        T] in float32, natural logarithm.

    Raises:
        NotImplementedError: ALiBi with a softcap, `cache_batch_idx` or `cache_leftpad` with
            `block_table`, several tokens without a causal mask, or rotation with T_new other than
            T.
        ValueError: only one of k and v; rotation without k; k without `cache_seqlens`; a dense
        cache of another batch size than q's without `cache_batch_idx`; dense caches whose sequences
        do not begin whole numbers of tokens apart, the same for both. What
        `torch_attn.paged_decode` and `torch_attn.append_kv` raise.

    Example::

        import torch
        from torch_attn.adapters.flash_attn import flash_attn_with_kvcache

        k_cache, v_cache = torch.zeros(2, 4, 512, 2, 64, dtype=torch.bfloat16)
        q = torch.randn(4, 1, 8, 64, dtype=torch.bfloat16)
        k, v = torch.randn(2, 4, 1, 2, 64, dtype=torch.bfloat16)
        lengths = torch.tensor([0, 7, 100, 511], dtype=torch.int32)
        out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths)
    """
    _no_softcap(alibi_slopes, softcap)
    chosen = {"cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
    for name, x in chosen.items():
        if x is not None and block_table is not None:
            fail(NotImplementedError, name, "None with block_table", type(x).__name__)
    for name, x in {"q": q, "k_cache": k_cache, "v_cache": v_cache}.items():
        check_tensor(name, x)
    for name, x in {**chosen, "cache_seqlens": cache_seqlens}.items():
        if x is None or isinstance(x, int):
            continue
        check_tensor(name, x)
        if x.shape != (len(q),) or x.dtype != torch.int32:
            fail(ValueError, name, f"[{len(q)}] int32", f"{tuple(x.shape)} {x.dtype}")
    if (k is None) != (v is None):
        fail(ValueError, "v", "k and v, or neither", "only one of them")
    for name, x, layout in (("q", q, "[B, T, Hq, D]"), ("k", k, "[B, T_new, Hkv, D]")):
        if x is not None and x.ndim != 4:
            fail(ValueError, name, f"4 dimensions {layout}", f"shape {tuple(x.shape)}")
    rotates = rotary_cos is not None or rotary_sin is not None
    if rotates and k is None:
        fail(ValueError, "k", "new keys with rotary_cos and rotary_sin", None)
    if rotates and k is not None and k.shape[1] != q.shape[1]:
        expected = f"q's {q.shape[1]} new tokens with rotary_cos and rotary_sin"
        fail(NotImplementedError, "k", expected, k.shape[1])
    if q.shape[1] > 1 and not causal and window_size[1] != 0:
        fail(NotImplementedError, "causal", f"True for {q.shape[1]} new tokens", causal)
    if cache_seqlens is None:
        if k is not None:
            fail(ValueError, "cache_seqlens", "the length of the cache before k", None)
        cache_seqlens = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if block_table is None:
        pages = _as_pages(q, k_cache, v_cache, cache_batch_idx)
    else:
        pages = k_cache, v_cache, block_table
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((len(q),), cache_seqlens, dtype=torch.int32, device=q.device)
    if k is not None and v is not None:
        cache_seqlens = cache_seqlens + k.shape[1]
        if rotates:
            q, *_ = append_kv(
                k, v, *pages, cache_seqlens, q=q, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
                rotary_interleaved=rotary_interleaved,
            )  # fmt: skip
        else:
            append_kv(k, v, *pages, cache_seqlens)
    if cache_leftpad is not None:
        pages = _as_pages(q, k_cache, v_cache, cache_batch_idx, cache_leftpad)
        cache_seqlens = cache_seqlens - cache_leftpad
    return paged_decode(
        q,
        *pages,
        cache_seqlens,
        scale=softmax_scale,
        window_size=_window(window_size),
        softcap=_softcap(softcap),
        alibi_slopes=alibi_slopes,
        num_splits=None if num_splits == 0 else num_splits,
        return_lse=return_softmax_lse,
    )


def _as_pages(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: Tensor | None, begins: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a dense cache [B, S, H, D] viewed as pages, and the table of q's sequences.

    They are the cache's `rows`, or all. With `begins` each begins at a slot of its own, and pages
    have one slot.
    """
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    steps = []  # tokens from one sequence to the next
    for name, cache in caches.items():
        if cache.ndim != 4 or cache.shape[:2] != k_cache.shape[:2]:
            expected = "[B, S, Hkv, D] without block_table, B and S alike for both caches"
            fail(ValueError, name, expected, tuple(cache.shape))
        if rows is None and len(cache) != len(q):
            expected = f"{len(q)} sequences without block_table and cache_batch_idx"
            fail(ValueError, name, expected, len(cache))
        sequence, token, *_ = strides_in_memory(cache)
        if len(cache) < 2 or cache.numel() == 0:
            sequence = 0
        step, rest = divmod(sequence, max(token, 1))
        steps.append(step)
        if rest != 0 or step != steps[0]:
            expected = "sequences that begin a whole number of tokens apart, as in k_cache"
            fail(ValueError, name, expected, f"strides {cache.stride()}")
    step, (batch, length) = steps[0], k_cache.shape[:2]
    largest = PAGE_SIZE_MAX if begins is None else 1
    size = next(n for n in range(largest, 0, -1) if step % n == length % n == 0)
    if rows is None:
        rows = torch.arange(batch, dtype=torch.int32, device=q.device)
    first = rows * (step // size) if begins is None else rows * step + begins
    pages = torch.arange(length // size, dtype=torch.int32, device=q.device)
    num_pages = ((batch - 1) * step + length) // size
    k_pages, v_pages = (_pages_of(cache, num_pages, size) for cache in caches.values())
    return k_pages, v_pages, first[:, None] + pages


def _pages_of(cache: Tensor, count: int, size: int) -> Tensor:
    _, token, *row = strides_in_memory(cache)
    return cache.as_strided((count, size, *cache.shape[2:]), (size * token, token, *row))


def _unpacked(name: str, x: Tensor, count: int, ndim: int) -> tuple[Tensor, ...]:
    """Return the parts of a packed tensor [..., count, H, D]."""
    if x.ndim != ndim or x.shape[-3] != count:
        expected = f"{ndim} dimensions [..., {count}, H, D]"
        fail(ValueError, name, expected, f"shape {tuple(x.shape)}")
    return x.unbind(-3)


def _no_softcap(alibi_slopes: Tensor | None, softcap: float) -> None:
    """Refuse slopes with a softcap: flash-attn subtracts them from capped scores."""
    if alibi_slopes is not None and _softcap(softcap) is not None:
        fail(NotImplementedError, "softcap", "0.0 with alibi_slopes", softcap)


def _no_probabilities(return_attn_probs: bool) -> None:
    if return_attn_probs:
        expected = "False (torch_attn.flash_attention has return_lse)"
        fail(NotImplementedError, "return_attn_probs", expected, return_attn_probs)


def _absent(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            fail(NotImplementedError, name, "None", type(value).__name__)


def _window(window_size: tuple[int, int]) -> tuple[int | None, int | None]:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        fail(TypeError, "window_size", "a pair (left, right), -1 for no limit", window_size)
    left, right = (None if side == -1 else side for side in window_size)
    return left, right


def _softcap(softcap: float) -> float | None:
    return None if softcap == 0 else softcap
