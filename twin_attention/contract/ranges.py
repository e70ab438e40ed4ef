"""Ranges of keys that a query sees whatever its window hides: `q_ranges`, made and checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, is_array_api_obj

from twin_attention.contract.reference.visibility import sequence_of_tokens
from twin_attention.contract.spec import RANGES_MAX
from twin_attention.contract.tree import integers_of
from twin_attention.contract.validate.block_mask import check_tiles
from twin_attention.contract.validate.errors import fail

Array = Any


def prefix_ranges(lengths: Any, tokens: int, cu_seqlens_q: Any = None) -> Any:
    """Return the ranges with which all queries of a sequence see its first keys (prefix-LM).

    It can be traced and waits for no device, as `span_ranges` does.

    Args:
        lengths: [B] integers, the keys of each prefix: a list, or an array of any library, whose
            kind and device the result has.
        tokens: Sq, or Tq of packed sequences.
        cu_seqlens_q: [B + 1] offsets of packed sequences, None for a batch.

    Returns:
        int32 [B, tokens, 1, 2], or packed [tokens, 1, 2].

    Source: Raffel et al. 2020 (T5), section 3.2.1.

    Example::

        import torch
        from torch_attn import flash_attention, prefix_ranges

        q, k, v = torch.randn(3, 2, 12, 4, 16)
        ranges = prefix_ranges(torch.tensor([5, 8]), tokens=12)
        out = flash_attention(q, k, v, causal=True, q_ranges=ranges)
    """
    xp, end, _ = _of_tokens(_numbers(lengths)[:, None], tokens, cu_seqlens_q, 0)
    end = xp.broadcast_to(end, (*end.shape[:-2], tokens, 1))
    return xp.stack([xp.zeros_like(end), end], axis=-1)


def span_ranges(
    starts: Any, ends: Any, tokens: int, cu_seqlens_q: Any = None, first: Any = 0
) -> Any:
    """Return the ranges with which the queries of a span, such as an image, see all of it.

    Of spans that overlap, a query sees from the first start to the last end.

    Args:
        starts, ends: [B, N] integers, positions of keys in each sequence; a span that is missing
            ends where it starts.
        tokens, cu_seqlens_q: as in `prefix_ranges`.
        first: the position of each sequence's first query, [B] integers or one.

    Returns:
        int32 [B, tokens, 1, 2], or packed [tokens, 1, 2].

    Example::

        import torch
        from torch_attn import flash_attention, span_ranges

        q, k, v = torch.randn(3, 1, 12, 4, 16)
        ranges = span_ranges(torch.tensor([[1, 7]]), torch.tensor([[4, 11]]), tokens=12)
        out = flash_attention(q, k, v, causal=True, q_ranges=ranges)
        assert ranges[0, :5, 0].tolist() == [[0, 0], [1, 4], [1, 4], [1, 4], [4, 4]]
    """
    starts = _numbers(starts)
    xp, starts, position = _of_tokens(starts, tokens, cu_seqlens_q, first)
    _, ends, _ = _of_tokens(_numbers(ends), tokens, cu_seqlens_q, first)
    own = position[..., None]
    is_inside = (starts <= own) & (own < ends)
    begin, end = (xp.concat([xp.where(is_inside, x, own), own], axis=-1) for x in (starts, ends))
    return xp.stack([xp.min(begin, axis=-1), xp.max(end, axis=-1)], axis=-1)[..., None, :]


def block_diffusion_ranges(block: int, length: int | Sequence[int]) -> np.ndarray:
    """Return the ranges of block diffusion's training: noisy tokens, then the same tokens clean.

    A noisy token sees its noisy block and the clean blocks before; a clean one sees the clean
    blocks up to its own. Call with ``causal=True, window_size=(0, 0)``, which hide the rest. For
    generation, `span_ranges` of the blocks and ``causal=True`` are enough.

    Args:
        block: tokens of a block.
        length: tokens of a sequence, half of attention's; several are packed.

    Returns:
        int32 [2 · length, 2, 2], NumPy.

    Source: Arriola et al. 2025 (BD3-LM), section 3.

    Example::

        import torch
        from torch_attn import block_diffusion_ranges, flash_attention

        q, k, v = torch.randn(3, 1, 24, 4, 16)  # 12 noisy tokens, 12 clean ones
        ranges = torch.from_numpy(block_diffusion_ranges(4, 12))[None]
        out = flash_attention(q, k, v, causal=True, window_size=(0, 0), q_ranges=ranges)
    """
    lengths = length if isinstance(length, Sequence) else [length]
    check_tiles(least=1, block=block)
    for size in lengths:
        check_tiles(length=size)
    found = [np.empty((0, 2, 2), np.int64)]
    for size in lengths:
        token = np.arange(size)
        start = token // block * block
        end = np.minimum(start + block, size)
        noisy = [start, end, np.full(size, size), size + start]
        clean = [np.full(size, size), size + end, size + token, size + token]
        found += [np.stack(x, -1).reshape(size, 2, 2) for x in (noisy, clean)]
    return np.concatenate(found).astype(np.int32)


def check_ranges(q_ranges: Any, keys: Any, cu_seqlens_q: Any = None) -> None:
    """Check ranges, which attention itself does not check.

    It waits for the device and reads values: use it for debugging, not in a CUDA graph.

    Args:
        q_ranges: [B, Sq, R, 2] integers, or packed [Tq, R, 2].
        keys: the number of keys, or [B] integers, that of each sequence.
        cu_seqlens_q: [B + 1] offsets of packed sequences; what follows the last is not checked.

    Raises:
        TypeError: what is no integer.
        ValueError: shapes that do not match; a range that ends before it begins, or one with keys
            that do not exist. The message names the first.

    Example::

        from torch_attn import check_ranges

        check_ranges([[[[0, 3]], [[2, 2]]]], keys=3)
        try:
            check_ranges([[[[0, 3]], [[2, 4]]]], keys=3)
        except ValueError as error:
            expected = "q_ranges[0, 1, 0]: expected a range of keys 0 to 3, got 2 to 4"
            assert str(error) == expected
    """
    ranges = integers_of("q_ranges", q_ranges)
    rank = 4 if cu_seqlens_q is None else 3
    if ranges.ndim != rank or ranges.shape[-1] != 2 or not 1 <= ranges.shape[-2] <= RANGES_MAX:
        layout = "[B, Sq, R, 2]" if rank == 4 else "[Tq, R, 2]"
        fail(ValueError, "q_ranges", f"shape {layout}, R at most {RANGES_MAX}", ranges.shape)
    keys, sequence = integers_of("keys", keys), None
    number = len(ranges)
    if cu_seqlens_q is not None:
        offsets = integers_of("cu_seqlens_q", cu_seqlens_q)
        number = len(offsets) - 1
        ranges = ranges[: offsets[-1]]
        sequence = sequence_of_tokens(np, offsets, len(ranges))
    if keys.shape not in ((), (number,)):
        fail(ValueError, "keys", f"one number, or shape ({number},)", keys.shape)
    keys = np.broadcast_to(keys, (number,))
    keys = keys[:, None, None] if sequence is None else keys[sequence][:, None]
    begin, end = ranges[..., 0], ranges[..., 1]
    is_wrong = (begin > end) | ((begin < end) & ((begin < 0) | (end > keys)))
    for index in np.argwhere(is_wrong)[:1]:
        most = np.broadcast_to(keys, begin.shape)[tuple(index)]
        where = ", ".join(map(str, index))
        got = f"{begin[tuple(index)]} to {end[tuple(index)]}"
        fail(ValueError, f"q_ranges[{where}]", f"a range of keys 0 to {most}", got)


def _numbers(x: Any) -> Array:
    x = x if is_array_api_obj(x) else np.asarray(x)
    xp = array_namespace(x)
    return xp.astype(x, xp.int32)


def _of_tokens(x: Array, tokens: int, cu_seqlens_q: Any, first: Any) -> tuple[Any, Array, Array]:
    """Return `x` [B, N] for each token, [B, 1, N] or [tokens, N], and the tokens' positions."""
    xp, on = array_namespace(x), device(x)
    first = xp.broadcast_to(xp.asarray(first, dtype=xp.int32, device=on), x.shape[:1])
    token = xp.arange(tokens, dtype=xp.int32, device=on)
    if cu_seqlens_q is None:
        return xp, x[:, None, :], first[:, None] + token
    offsets = _numbers(cu_seqlens_q)
    sequence = sequence_of_tokens(xp, offsets, tokens)
    nothing = xp.zeros((1, x.shape[1]), dtype=xp.int32, device=on)  # of padding
    own = xp.take(first - offsets[:-1], sequence % max(1, len(x)), axis=0) if len(x) else 0
    return xp, xp.take(xp.concat([x, nothing]), sequence, axis=0), own + token
