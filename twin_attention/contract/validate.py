"""Argument checks. No other module writes an error message about an argument.

Every message reads ``name: expected ..., got ...``. `ValueError` and `TypeError` are for what
is wrong anywhere, `NotImplementedError` for what is valid but not supported here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from operator import index
from typing import Any, NamedTuple, NoReturn

import numpy as np

from twin_attention.contract.operands import (
    AppendOperands,
    BlockSparseOperands,
    DecodeOperands,
    FlashOperands,
    PagedOperands,
    VarlenOperands,
)
from twin_attention.contract.spec import (
    DECODE_DTYPES,
    DTYPES,
    HEAD_DIM_MAX,
    HEAD_DIM_MIN,
    HEAD_DIM_STEP,
    PAGE_SIZE_MAX,
    PRECISIONS,
    QUANTIZED_DTYPES,
    SPLITS_MAX,
    TILE_SIZES,
    TOKENS_MAX,
    WINDOW_UNLIMITED,
    AppendSpec,
    AttentionSpec,
    BlockSparseSpec,
    DecodeOptions,
    DecodeSpec,
    DilatedSpec,
    Dilation,
    FlashOptions,
    MergeSpec,
    PagedCache,
    PagedSpec,
    Precision,
    VarlenSpec,
    tile_size,
)


class Operand(NamedTuple):
    """Describe a tensor to the argument checks, whichever framework owns it.

    Attributes:
        name: the argument's name, as messages print it.
        shape: dimensions.
        dtype: the framework's dtype name without a prefix, such as "bfloat16".
        device: a comparable name such as "cpu" or "cuda:0"; None when it is not known (a tracer).
        contiguous_rows: False when the last dimension has a stride other than 1.
        even_rows: False when a row begins at an odd offset or distance from others, in elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str | None = None
    contiguous_rows: bool = True
    even_rows: bool = True


_HEAD_DIMS = f"a head dimension from {HEAD_DIM_MIN} to {HEAD_DIM_MAX} in steps of {HEAD_DIM_STEP}"


def fail(error: type[Exception], name: str, expected: str, got: object) -> NoReturn:
    """Raise `error` in the project's one message format."""
    raise error(f"{name}: expected {expected}, got {got}")


def not_a_tensor(name: str, expected: str, got: object) -> NoReturn:
    """Refuse an argument that is not `expected`, such as "a torch.Tensor"."""
    fail(TypeError, name, expected, type_name(got))


def type_name(x: object) -> str:
    """Return the name of an object's type, with its module: numpy.bool is not bool."""
    cls = type(x)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__name__}"


def _got(x: object, described: str) -> str:
    """Return how a message prints a wrong option; a value that JAX traces is no option."""
    if type(x).__name__[-6:] == "Tracer":  # torch.compile of torch 2.11 traces no `endswith`
        return "a traced value; options are static: pass it by static_argnames"
    return described


def not_differentiable(what: str, instead: str, function: str = "flash_attention") -> NoReturn:
    """Refuse a derivative that has no formula here, and name the way out."""
    raise NotImplementedError(
        f"{function}: {what} is not supported; reverse mode, once, is. {instead}"
    )


def no_gradient(function: str) -> NoReturn:
    """Refuse any derivative of a function that is for inference only."""
    raise NotImplementedError(
        f"{function}: a gradient is not supported; give it operands that need none "
        "(torch.no_grad, jax.lax.stop_gradient), or use flash_attention"
    )


def one_pool() -> NoReturn:
    """Refuse one memory for the keys and the values of a cache that is written in place."""
    fail(ValueError, "v_pages", "memory of its own", "k_pages' memory")


def not_mapped(function: str) -> NoReturn:
    """Refuse `vmap` of a function whose operands are packed sequences."""
    raise NotImplementedError(
        f"{function}: vmap is not supported; pack the sequences of the whole batch"
    )


def not_mapped_with_sinks() -> NoReturn:
    """Refuse `vmap` over integers of tokens with what has no batch that it could join."""
    raise NotImplementedError(
        "flash_attention: vmap over segment ids, ends or depths with sinks, relative_bias or "
        "alibi_slopes of heads is not supported; call it for each, or share them"
    )


def not_mapped_with_sinks_and_mask() -> NoReturn:
    """Refuse `vmap` of a block-sparse attention with sinks, which have no batch to join."""
    raise NotImplementedError(
        "block_sparse_attention: vmap with sinks is not supported; call it for each"
    )


def check_flash_options(
    causal: Any,
    scale: Any,
    window_size: Any,
    softcap: Any,
    deterministic: Any,
    precision: Any,
    return_lse: Any,
) -> FlashOptions:
    """Check the options that all functions of flash attention share.

    The checks of options look at types and compare numbers, and do nothing else, so that
    `torch.compile` traces them.

    Raises:
        ValueError: a number that is out of range, or a name that is no choice.
        TypeError: an option of the wrong type.
    """
    _check_flag("return_lse", return_lse)
    number, cap = _resolve_scale(scale), _resolve_softcap(softcap)
    number, causal = _scale_within(number, cap), _check_flag("causal", causal)
    left, right = _resolve_window(window_size)
    if deterministic is not None:
        _check_flag("deterministic", deterministic, or_else="None or ")
    right = 0 if causal else right
    return FlashOptions(number, left, right, cap, deterministic, _check_precision(precision))


def check_attention_options(
    causal: Any,
    scale: Any,
    window_size: Any,
    softcap: Any,
    deterministic: Any,
    precision: Any,
    dropout_rate: Any,
    return_row_max: Any,
    return_lse: Any,
) -> FlashOptions:
    """Check the options that `flash_attention` and `flash_attention_varlen` have, these alone too.

    Raises:
        As `check_flash_options`.
    """
    options = check_flash_options(
        causal, scale, window_size, softcap, deterministic, precision, return_lse
    )
    return options._replace(
        row_max=_check_flag("return_row_max", return_row_max),
        dropout_rate=_check_rate(dropout_rate),
    )


def check_decode_options(
    scale: Any,
    window_size: Any,
    softcap: Any,
    num_splits: Any,
    cascade: Any,
    return_lse: Any,
) -> DecodeOptions:
    """Check the options of `paged_decode`.

    Raises:
        As `check_flash_options`.
    """
    _check_flag("return_lse", return_lse)
    left, _ = _resolve_window(window_size)
    number, cap = _resolve_scale(scale), _resolve_softcap(softcap)
    return DecodeOptions(
        _scale_within(number, cap),
        left,
        cap,
        None
        if num_splits is None
        else _check_integer("num_splits", num_splits, 1, SPLITS_MAX, or_else="None or "),
        _check_cascade(cascade, num_splits),
    )


def check_paged_options(
    scale: Any, window_size: Any, softcap: Any, num_splits: Any, return_lse: Any
) -> DecodeOptions:
    """Check the options of `paged_attention`.

    Raises:
        As `check_flash_options`.
    """
    return check_decode_options(scale, window_size, softcap, num_splits, False, return_lse)


def _check_cascade(cascade: Any, num_splits: Any) -> bool:
    """Check an option whose sums depend on the batch, which num_splits excludes."""
    if _check_flag("cascade", cascade) and num_splits is not None:
        expected = "False with num_splits, whose results do not depend on the batch"
        fail(ValueError, "cascade", expected, cascade)
    return cascade


def check_append_options(rotary_interleaved: Any) -> bool:
    """Check the option of `append_kv` and return it.

    Raises:
        TypeError: it is no bool.
    """
    return _check_flag("rotary_interleaved", rotary_interleaved)


def check_flash_attention(operands: FlashOperands[Operand], options: FlashOptions) -> AttentionSpec:
    """Check the operands of `flash_attention` and describe the problem.

    Raises:
        ValueError: ranks, sizes, devices, strides or values that contradict each other.
        TypeError: an argument of the wrong type or dtype.
        NotImplementedError: a head dimension or dtype that the kernels do not take.
    """
    _check_qkv(operands, ("[B, Sq, Hq, D]", "[B, Skv, Hkv, D]", "[B, Skv, Hkv, Dv]"))
    _check_sinks(operands)
    _check_segment_ids(operands)
    _check_tree(operands, options)
    _check_terms(operands, operands.q.shape[0])
    _check_bias(operands)
    _check_dropout(operands, options)
    return AttentionSpec.of(operands, operands.q.dtype, options)


def check_flash_attention_varlen(
    operands: VarlenOperands[Operand], options: FlashOptions
) -> VarlenSpec:
    """Check the operands of `flash_attention_varlen` and describe the problem.

    Raises:
        As `check_flash_attention`.
    """
    _check_qkv(operands, ("[Tq, Hq, D]", "[Tkv, Hkv, D]", "[Tkv, Hkv, Dv]"))
    _check_offsets(operands.cu_seqlens_q, operands.cu_seqlens_kv)
    for x in (operands.cu_seqlens_q, operands.cu_seqlens_kv):
        _check_device(x, operands.q)
    _check_sinks(operands)
    _check_tree(operands, options)
    _check_terms(operands, operands.cu_seqlens_q.shape[0] - 1)
    _check_dropout(operands, options)
    return VarlenSpec.of(operands, operands.q.dtype, options)


def check_block_sparse_attention(
    operands: BlockSparseOperands[Operand], options: FlashOptions
) -> BlockSparseSpec:
    """Check the operands of `block_sparse_attention` and describe the problem.

    Raises:
        As `check_flash_attention`.
    """
    _check_qkv(operands, ("[B, Sq, Hq, D]", "[B, Skv, Hkv, D]", "[B, Skv, Hkv, Dv]"))
    q, k = operands.q, operands.k
    of_queries, of_keys = operands.kv_counts, operands.q_counts
    lists = of_queries, operands.kv_tiles, of_keys, operands.q_tiles
    for x in lists:
        _check_device(x, q)
    check_lists(*lists)
    _check_mask_axes(of_queries, of_queries.shape[:2], q)
    _check_number_of_tiles(of_queries, of_queries.shape[2], q.shape[1], "queries")
    _check_number_of_tiles(of_keys, of_keys.shape[2], k.shape[1], "keys")
    _check_sinks(operands)
    return BlockSparseSpec.of(operands, q.dtype, options)


def check_lists(kv_counts: Operand, kv_tiles: Operand, q_counts: Operand, q_tiles: Operand) -> None:
    """Check the lists of a block mask, but for what they hold.

    Raises:
        TypeError: another dtype.
        ValueError: shapes that contradict each other.
    """
    lists = ((kv_counts, kv_tiles), (q_counts, q_tiles))
    for counts, tiles in lists:
        for x in (counts, tiles):
            _check_dtype(x, "int32")
        if len(counts.shape) != 3:
            expected = "3 dimensions [B or 1, Hq or 1, tiles]"
            fail(ValueError, counts.name, expected, f"shape {counts.shape}")
    if q_counts.shape[:2] != kv_counts.shape[:2]:
        expected = f"kv_counts' masks {kv_counts.shape[:2]}"
        fail(ValueError, q_counts.name, expected, q_counts.shape[:2])
    is_empty = 0 in (kv_counts.shape[2], q_counts.shape[2])
    for counts, tiles in lists:
        if tiles.shape[:-1] != counts.shape or (tiles.shape[-1] == 0 and not is_empty):
            expected = f"shape ({', '.join(map(str, counts.shape))}, width) and a width from 1 on"
            fail(ValueError, tiles.name, expected, tiles.shape)


def check_list_values(
    kv_counts: np.ndarray, kv_tiles: np.ndarray, q_counts: np.ndarray, q_tiles: np.ndarray
) -> None:
    """Check the data of a block mask's lists, whose shapes match.

    Raises:
        ValueError: a count out of range, or a tile in a list that does not exist or does not come
            after the one before it; a tile in a list of one direction that the other lacks. The
            message names the first such entry or list.
    """
    of_queries = _kept_by_lists("kv", kv_counts, kv_tiles, q_counts.shape[2])
    of_keys = _kept_by_lists("q", q_counts, q_tiles, kv_counts.shape[2]).swapaxes(2, 3)
    for b, h, query, key in np.argwhere(of_queries != of_keys)[:1]:
        lists = (("kv_tiles", query, key), ("q_tiles", key, query))
        (has, row, tile), (lacks, other, _) = lists if of_queries[b, h, query, key] else lists[::-1]
        expected = f"tile {row} in it, as {has}[{b}, {h}, {row}] has tile {tile}"
        fail(ValueError, f"{lacks}[{b}, {h}, {other}]", expected, "none")


def _kept_by_lists(of: str, counts: np.ndarray, tiles: np.ndarray, limit: int) -> np.ndarray:
    """Check the lists of one direction; return the tiles that they keep, of `limit` in each."""
    most = min(tiles.shape[-1], limit)
    for where in np.argwhere((counts < 0) | (counts > most))[:1]:
        name = f"{of}_counts{where.tolist()}"
        fail(ValueError, name, f"a count from 0 to {most}", counts[tuple(where)])
    listed = np.arange(tiles.shape[-1]) < counts[..., None]
    least = np.zeros(tiles.shape, np.int64)
    least[..., 1:] = tiles[..., :-1].astype(np.int64) + 1
    for where in np.argwhere(listed & ((tiles < least) | (tiles >= limit)))[:1]:
        tile, first = int(tiles[tuple(where)]), int(least[tuple(where)])
        expected = f"a tile from 0 to {limit - 1}"
        if 0 <= tile < limit:  # it exists, and comes too early
            expected = f"a tile after {first - 1}"
        fail(ValueError, f"{of}_tiles{where.tolist()}", expected, tile)
    kept = np.zeros((*counts.shape, limit), bool)
    *rows, _ = entries = np.nonzero(listed)
    kept[(*rows, tiles[entries])] = True
    return kept


def check_kept_tiles(kept: Operand, q: Operand, k: Operand) -> None:
    """Check a block mask of booleans; q and k are not checked.

    Raises:
        TypeError: another dtype.
        ValueError: a shape that does not fit q and k.
    """
    check_mask(kept)
    _check_device(kept, q)
    if len(q.shape) == len(k.shape) == 4:
        *masks, tiles_q, tiles_kv = (1,) * (4 - len(kept.shape)) + kept.shape
        _check_mask_axes(kept, tuple(masks), q)
        _check_number_of_tiles(kept, tiles_q, q.shape[1], "queries")
        _check_number_of_tiles(kept, tiles_kv, k.shape[1], "keys")


def check_mask(kept: Operand) -> None:
    """Check a block mask of booleans by itself.

    Raises:
        TypeError: another dtype.
        ValueError: another number of dimensions.
    """
    _check_dtype(kept, "bool")
    if not 2 <= len(kept.shape) <= 4:
        expected = "2 to 4 dimensions [B or 1, Hq or 1, tiles_q, tiles_kv]"
        fail(ValueError, kept.name, expected, f"shape {kept.shape}")


def check_tiles(least: int = 0, **numbers: Any) -> None:
    """Refuse what is no number of tiles, or less than `least`.

    Raises:
        TypeError: it is no integer.
        ValueError: it is out of range.
    """
    for name, value in numbers.items():
        _check_integer(name, value, least, WINDOW_UNLIMITED)


def check_dilations(segment_lengths: Any, dilation_rates: Any) -> tuple[Dilation, ...]:
    """Check the pairs of `dilated_attention`, as `check_flash_options` checks options.

    Raises:
        ValueError: there is none, a pair is not whole, or its numbers do not fit each other.
        TypeError: what is no list or tuple of integers.
    """
    named = {"segment_lengths": segment_lengths, "dilation_rates": dilation_rates}
    for name, values in named.items():
        expected = "a list or tuple of integers, one or more"
        if not isinstance(values, tuple | list):
            fail(TypeError, name, expected, repr(values))
        if len(values) == 0:
            fail(ValueError, name, expected, repr(values))
    if len(dilation_rates) != len(segment_lengths):
        expected = f"segment_lengths' {len(segment_lengths)} numbers"
        fail(ValueError, "dilation_rates", expected, len(dilation_rates))
    # `index` makes constants of them for `torch.compile`, which may take integers as variables.
    lengths, rates = (
        [
            index(_check_integer(f"{name}[{i}]", x, 1, WINDOW_UNLIMITED))
            for i, x in enumerate(values)
        ]
        for name, values in named.items()
    )
    for i, (length, rate) in enumerate(zip(lengths, rates, strict=True)):
        if length % rate:
            fail(ValueError, f"segment_lengths[{i}]", f"a multiple of its rate {rate}", length)
    return tuple(map(Dilation, lengths, rates))


def check_dilated_attention(
    operands: FlashOperands[Operand], dilations: tuple[Dilation, ...], options: FlashOptions
) -> DilatedSpec:
    """Check the operands of `dilated_attention` and describe the problem.

    Raises:
        As `check_flash_attention`.
    """
    _check_qkv(operands, ("[B, S, Hq, D]", "[B, S, Hkv, D]", "[B, S, Hkv, Dv]"))
    q, k = operands.q, operands.k
    if k.shape[1] != q.shape[1]:
        fail(ValueError, "k", f"q's length {q.shape[1]}", k.shape[1])
    check_segments(dilations, q.shape[1])
    return DilatedSpec.of(operands, q.dtype, options, dilations=dilations)


def check_segments(dilations: tuple[Dilation, ...], length: int) -> None:
    """Check that segments are whole in a sequence of this length.

    Raises:
        ValueError: those of a pair are not.
    """
    for i, (segment_length, _) in enumerate(dilations):
        if length % segment_length:
            expected = f"a divisor of q's length {length}"
            fail(ValueError, f"segment_lengths[{i}]", expected, segment_length)


def check_context_plan(
    seq_len: Any, size: Any, layout: Any, cu_seqlens: Any, layouts: Sequence[str]
) -> tuple[int, int, str, tuple[int, ...] | None]:
    """Check the arguments of `context_plan` and return them.

    Raises:
        TypeError: a number that is no integer.
        ValueError: one out of range, a length that does not divide, or no such layout.
    """
    seq_len = _check_integer("seq_len", seq_len, 0, WINDOW_UNLIMITED)
    size = _check_integer("size", size, 1, WINDOW_UNLIMITED)
    if layout not in layouts:
        fail(ValueError, "layout", "one of " + ", ".join(map(repr, layouts)), repr(layout))
    parts = 2 * size if layout == "zigzag" else size
    if seq_len % parts:
        expected = f"a multiple of {parts}, for {size} ranks in layout {layout!r}"
        fail(ValueError, "seq_len", expected, seq_len)
    if cu_seqlens is None:
        return seq_len, size, layout, None
    offsets = np.asarray(cu_seqlens)
    if offsets.ndim != 1 or len(offsets) < 2:
        fail(ValueError, "cu_seqlens", "shape (N + 1,) for N documents", offsets.shape)
    if offsets.dtype.kind not in "iu":
        fail(TypeError, "cu_seqlens", "integers", offsets.dtype)
    check_offset_values("cu_seqlens", offsets, seq_len)
    return seq_len, size, layout, tuple(offsets.tolist())


def check_context_attention(
    operands: FlashOperands[Operand], options: FlashOptions, local_len: int
) -> AttentionSpec:
    """Check a rank's operands of `context_attention`, and describe them as a sequence of their own.

    Args:
        operands: the rank's tokens.
        options: checked.
        local_len: how many the plan gives each rank.

    Raises:
        As `check_flash_attention`.
    """
    spec = check_flash_attention(operands, options)
    for x in (operands.q, operands.k):
        if x.shape[1] != local_len:
            fail(ValueError, x.name, f"the plan's {local_len} tokens of a rank", x.shape[1])
    return spec


def check_exchange(
    exchange: Any, choices: Sequence[str], heads: tuple[int, int], size: int
) -> None:
    """Check how ranks exchange keys.

    Args:
        exchange: what the caller asked for, or None.
        choices: the names that there are.
        heads: of queries and of keys.
        size: ranks.

    Raises:
        ValueError: no such name, or heads that cannot be dealt out.
    """
    check_choice("exchange", exchange, choices)
    for name, count in zip("qk", heads, strict=True):
        if exchange == "heads" and count % size:
            fail(ValueError, name, f"heads that {size} ranks share for exchange 'heads'", count)


def check_group(plan_size: int, group_size: int) -> None:
    """Refuse a plan for another number of ranks than the group has."""
    if plan_size != group_size:
        fail(ValueError, "plan", f"a plan for the group's {group_size} ranks", plan_size)


def check_rank(rank: Any, size: int) -> int:
    """Check that a plan for `size` ranks has this one, and return it.

    Raises:
        TypeError: it is no integer.
        ValueError: it is out of range.
    """
    return _check_integer("rank", rank, 0, size - 1)


def check_whole(name: str, shape: tuple[int, ...], axis: int, length: int) -> None:
    """Refuse an array whose axis of tokens has another length than a plan's sequence."""
    if not -len(shape) <= axis < len(shape) or shape[axis] != length:
        fail(ValueError, name, f"{length} tokens along axis {axis}", f"shape {tuple(shape)}")


def check_shards(shapes: list[tuple[int, ...]], axis: int, size: int, length: int) -> None:
    """Refuse the tokens of another number of ranks, or of other lengths, than a plan has."""
    if len(shapes) != size:
        fail(ValueError, "xs", f"the tokens of {size} ranks", len(shapes))
    for rank, shape in enumerate(shapes):
        check_whole(f"xs[{rank}]", shape, axis, length)


def check_paged_decode(operands: DecodeOperands[Operand], options: DecodeOptions) -> DecodeSpec:
    """Check the operands of `paged_decode` and describe the problem.

    Raises:
        ValueError: ranks, sizes, devices, strides or values that contradict each other.
        TypeError: an argument of the wrong type or dtype.
        NotImplementedError: a head dimension, page size, dtype or number of tokens that the kernels
            do not take.
    """
    q = operands.q
    if len(q.shape) not in (3, 4):
        expected = "3 or 4 dimensions [B, Hq, D] or [B, T, Hq, D]"
        fail(ValueError, q.name, expected, f"shape {q.shape}")
    cache = _check_cache(q, operands, *q.shape[:-2])
    _check_queries(operands, cache)
    batch, *tokens = q.shape[:-2]
    _check_tree_ends(operands, (batch, *(tokens or (1,))), options)
    return DecodeSpec.of(operands, q.dtype, cache.dtype, options)


def check_paged_attention(operands: PagedOperands[Operand], options: DecodeOptions) -> PagedSpec:
    """Check the operands of `paged_attention` and describe the problem.

    Raises:
        As `check_paged_decode`.
    """
    q, offsets = operands.q, operands.cu_seqlens_q
    if len(q.shape) != 3:
        fail(ValueError, q.name, "3 dimensions [Tq, Hq, D]", f"shape {q.shape}")
    _check_offsets(offsets)
    cache = _check_cache(q, operands, offsets.shape[0] - 1)
    _check_device(offsets, q)
    _check_queries(operands, cache)
    _check_tree_ends(operands, q.shape[:1], options)
    return PagedSpec.of(operands, q.dtype, cache.dtype, options)


def check_append_kv(operands: AppendOperands[Operand], interleaved: bool) -> AppendSpec:
    """Check the operands of `append_kv` and describe the problem.

    Raises:
        As `check_paged_decode`.
    """
    k_new, v_new, offsets = operands.k_new, operands.v_new, operands.cu_seqlens_q
    if offsets is not None:
        if len(k_new.shape) != 3:
            expected = "3 dimensions [Tq, Hkv, D] with cu_seqlens_q"
            fail(ValueError, k_new.name, expected, f"shape {k_new.shape}")
        _check_offsets(offsets)
        cache = _check_cache(k_new, operands, offsets.shape[0] - 1)
        _check_device(offsets, k_new)
    else:
        if len(k_new.shape) not in (3, 4):
            expected = "3 or 4 dimensions [B, Hkv, D] or [B, T, Hkv, D]"
            fail(ValueError, k_new.name, expected, f"shape {k_new.shape}")
        cache = _check_cache(k_new, operands, *k_new.shape[:-2])
    expected = (*k_new.shape[:-2], cache.heads)
    for x, size in ((k_new, cache.head_dim), (v_new, cache.head_dim_v)):
        if x.shape != (*expected, size):
            fail(ValueError, x.name, f"shape {(*expected, size)}", x.shape)
    _check_dtype(v_new, k_new.dtype, "k_new's ")
    _check_device(v_new, k_new)
    _check_rows(v_new)
    _check_scales(cache, k_new, operands)
    _check_rotary(operands, cache)
    return AppendSpec.of(operands, k_new.dtype, cache.dtype, interleaved)


def check_merge_states(outs: Operand, lses: Operand) -> MergeSpec:
    """Check the arguments of `merge_states` and describe the problem.

    Raises:
        ValueError: ranks, sizes, devices or strides that contradict each other.
        TypeError: an argument of the wrong dtype.
        NotImplementedError: a head dimension or dtype that the kernel does not take.
    """
    if len(outs.shape) not in (4, 5):
        expected = "4 or 5 dimensions [N, B, H, Dv] or [N, B, S, H, Dv]"
        fail(ValueError, "outs", expected, f"shape {outs.shape}")
    _check_float(outs, DTYPES)
    _check_head_dim(outs)
    _check_rows(outs)
    states, batch, *tokens, heads, head_dim_v = outs.shape
    _check_dtype(lses, "float32")
    if lses.shape != (states, batch, heads, *tokens):
        fail(ValueError, "lses", f"shape {(states, batch, heads, *tokens)}", lses.shape)
    _check_device(lses, outs)
    return MergeSpec(states, batch, tokens[0] if tokens else 1, heads, head_dim_v, outs.dtype)


def check_pages_arguments(
    k_pages: Operand,
    block_tables: Operand,
    seq_lens: Operand,
    cu_seqlens_q: Operand | None,
    num_new_tokens: Any,
) -> None:
    """Check the arguments of `check_pages`, but for what they hold.

    Raises:
        As `check_append_kv`.
    """
    if num_new_tokens is not None:
        _check_integer("num_new_tokens", num_new_tokens, 0, TOKENS_MAX)
        if cu_seqlens_q is not None:
            fail(ValueError, "num_new_tokens", "None beside cu_seqlens_q", num_new_tokens)
    _check_pool(k_pages)
    batch, *_ = (block_tables if len(block_tables.shape) == 2 else seq_lens).shape[:1] or (0,)
    _check_tables(k_pages, block_tables, seq_lens, batch)
    if cu_seqlens_q is not None:
        _check_dtype(cu_seqlens_q, "int32")
        if cu_seqlens_q.shape != (batch + 1,):
            fail(ValueError, "cu_seqlens_q", f"shape {(batch + 1,)}", cu_seqlens_q.shape)


def check_page_ids(
    tables: np.ndarray,
    lengths: np.ndarray,
    offsets: np.ndarray | None,
    num_new_tokens: int | None,
    pool: Sequence[int],
) -> None:
    """Check the data that tells where a decode reads and writes: lengths, and the page ids in use.

    Args:
        tables: [B, max_pages] integers.
        lengths: [B] integers.
        offsets: [B + 1] integers, of new tokens that are packed, or None.
        num_new_tokens: how many tokens at the end of each sequence are written where they are not
            packed; None is 1.
        pool: its pages and the size of a page.

    Raises:
        ValueError: offsets as `check_offset_values` refuses them; a length out of the tables'
            capacity, or a page id that is not in the pool, of the first sequence where this is so;
            or a page where two sequences have new tokens.
    """
    num_pages, page_size = pool
    if offsets is None:
        new = np.full(lengths.shape, 1 if num_new_tokens is None else num_new_tokens)
    else:
        check_offset_values("cu_seqlens_q", offsets, WINDOW_UNLIMITED)
        new = np.diff(offsets)
    capacity = tables.shape[1] * page_size
    used = np.arange(tables.shape[1]) * page_size < lengths[:, None]
    missing = used & ((tables < 0) | (tables >= num_pages))
    impossible = (lengths < 0) | (lengths > capacity)
    for b in np.flatnonzero(impossible | missing.any(axis=1))[:1]:
        if impossible[b]:
            fail(ValueError, f"seq_lens[{b}]", f"a length from 0 to {capacity}", lengths[b])
        i = np.flatnonzero(missing[b])[0]
        expected = f"one of the pool's {num_pages} pages"
        fail(ValueError, f"block_tables[{b}, {i}]", expected, tables[b, i])
    end = np.arange(1, tables.shape[1] + 1) * page_size
    written = used & (end > (lengths - new)[:, None]) & (new > 0)[:, None]
    writers: dict[int, int] = {}
    for b, i in np.argwhere(written):
        page = int(tables[b, i])
        if (other := writers.setdefault(page, b)) != b:
            expected = f"a page that sequence {other} does not write to as well"
            fail(ValueError, f"block_tables[{b}, {i}]", expected, page)


def check_offsets_arguments(
    cu_seqlens_q: Operand, cu_seqlens_kv: Operand, tokens_q: Any, tokens_kv: Any
) -> None:
    """Check the arguments of `check_offsets`, but for what they hold.

    Raises:
        As `check_flash_attention_varlen`.
    """
    for name, tokens in (("tokens_q", tokens_q), ("tokens_kv", tokens_kv)):
        _check_integer(name, tokens, 0, WINDOW_UNLIMITED)
    _check_offsets(cu_seqlens_q, cu_seqlens_kv)


def check_offset_values(name: str, offsets: np.ndarray, tokens: int) -> None:
    """Check the data that tells where packed sequences begin.

    Args:
        name: the argument's.
        offsets: [N + 1] integers.
        tokens: length of the axis that the sequences share.

    Raises:
        ValueError: the first offset is not 0, one is less than the one before it, or one exceeds
            the tokens. The message names the first such offset.
    """
    least = np.concatenate([[0], offsets[:-1]])
    bad = (offsets < least) | (offsets > tokens)
    bad[0] |= offsets[0] != 0
    for i in np.flatnonzero(bad)[:1]:
        expected = f"an offset from {least[i]} to {tokens}" if i else "0"
        fail(ValueError, f"{name}[{i}]", expected, offsets[i])


def _check_cache(
    new: Operand,
    operands: DecodeOperands[Operand] | PagedOperands[Operand] | AppendOperands[Operand],
    batch: int,
    tokens: int = 1,
) -> PagedCache:
    """Check what the functions of a paged cache take alike.

    Args:
        new: q, or the new keys.
        operands: all of them.
        batch: how many sequences there are.
        tokens: how many new ones each has, where that is limited.
    """
    k_pages, v_pages = operands.k_pages, operands.v_pages
    block_tables, seq_lens = operands.block_tables, operands.seq_lens
    _check_pool(k_pages)
    if len(v_pages.shape) != 4:
        expected = "4 dimensions [P, page_size, Hkv, Dv]"
        fail(ValueError, "v_pages", expected, f"shape {v_pages.shape}")
    _check_float(new, DECODE_DTYPES)
    if k_pages.dtype not in (new.dtype, *QUANTIZED_DTYPES):
        choices = ", ".join((f"{new.name}'s {new.dtype}", *QUANTIZED_DTYPES))
        fail(TypeError, "k_pages", choices, k_pages.dtype)
    _check_dtype(v_pages, k_pages.dtype, "k_pages' ")
    if v_pages.shape[:3] != k_pages.shape[:3]:
        expected = f"k_pages' pages, page size and heads {k_pages.shape[:3]}"
        fail(ValueError, "v_pages", expected, v_pages.shape[:3])
    for x in (k_pages, v_pages):
        _check_head_dim(x)
    if tokens > TOKENS_MAX:
        fail(NotImplementedError, new.name, f"at most {TOKENS_MAX} new tokens", tokens)
    _check_tables(k_pages, block_tables, seq_lens, batch)
    for x in (k_pages, v_pages, block_tables, seq_lens):
        _check_device(x, new)
    for x in (new, k_pages, v_pages, block_tables, seq_lens):
        _check_rows(x)
    for x in (k_pages, v_pages):
        # The kernels read them two columns at a time.
        if x.dtype in QUANTIZED_DTYPES and not x.even_rows:
            fail(ValueError, x.name, "rows at even offsets in an 8-bit cache", "an odd one")
    return PagedCache.of(operands, k_pages.dtype)


def _check_pool(k_pages: Operand) -> None:
    if len(k_pages.shape) != 4:
        expected = "4 dimensions [P, page_size, Hkv, D]"
        fail(ValueError, "k_pages", expected, f"shape {k_pages.shape}")
    if not 1 <= k_pages.shape[1] <= PAGE_SIZE_MAX:
        expected = f"a page size from 1 to {PAGE_SIZE_MAX}"
        fail(NotImplementedError, "k_pages", expected, k_pages.shape[1])


def _check_tables(k_pages: Operand, block_tables: Operand, seq_lens: Operand, batch: int) -> None:
    for x in (block_tables, seq_lens):
        _check_dtype(x, "int32")
    if len(block_tables.shape) != 2 or block_tables.shape[0] != batch:
        fail(ValueError, "block_tables", f"shape ({batch}, max_pages)", block_tables.shape)
    if seq_lens.shape != (batch,):
        fail(ValueError, "seq_lens", f"shape {(batch,)}", seq_lens.shape)
    capacity = block_tables.shape[1] * k_pages.shape[1]
    if capacity >= 2**31:
        fail(NotImplementedError, "block_tables", "a capacity of less than 2^31 keys", capacity)


def _check_queries(
    operands: DecodeOperands[Operand] | PagedOperands[Operand], cache: PagedCache
) -> None:
    """Check what a decode takes beside its cache: heads, scales and sinks."""
    head_dim = operands.q.shape[-1]
    if head_dim != cache.head_dim:
        fail(ValueError, "q", f"k_pages' head dimension {cache.head_dim}", head_dim)
    _check_heads(operands.q, cache)
    _check_scales(cache, operands.q, operands)
    _check_sinks(operands)


def _check_tree_ends(
    operands: DecodeOperands[Operand] | PagedOperands[Operand],
    shape: tuple[int, ...],
    options: DecodeOptions,
) -> None:
    x = operands.tree_ends
    if x is None:
        return
    _check_dtype(x, "int32")
    if x.shape != shape:
        fail(ValueError, "tree_ends", f"shape {shape}, one of each new token", x.shape)
    _check_device(x, operands.q)
    _check_rows(x)
    if options.window_left is not None:  # what it counts in a tree, positions or depths, is open
        expected = "no window to the left with tree_ends"
        fail(NotImplementedError, "window_size", expected, options.window_left)


def _check_heads(q: Operand, cache: PagedCache) -> None:
    heads_q = q.shape[-2]
    if (cache.heads == 0 and heads_q != 0) or (cache.heads != 0 and heads_q % cache.heads != 0):
        expected = f"a number of heads divisible by k_pages' {cache.heads}"
        fail(ValueError, "q", expected, heads_q)


def _check_scales(
    cache: PagedCache,
    new: Operand,
    operands: DecodeOperands[Operand] | PagedOperands[Operand] | AppendOperands[Operand],
) -> None:
    for name, x in (("k_scale", operands.k_scale), ("v_scale", operands.v_scale)):
        if not cache.is_quantized:
            if x is not None:
                fail(ValueError, name, f"None for a cache in {cache.dtype}", f"shape {x.shape}")
            continue
        if x is None:
            fail(ValueError, name, f"a scale for a cache in {cache.dtype}", None)
        _check_dtype(x, "float32")
        if x.shape not in ((), (cache.heads,)):
            expected = f"shape () or {(cache.heads,)}, one of all heads or of each kv head"
            fail(ValueError, name, expected, x.shape)
        _check_device(x, new)
        _check_rows(x)


def _check_rotary(operands: AppendOperands[Operand], cache: PagedCache) -> None:
    k_new, q, cos, sin = operands.k_new, operands.q, operands.rotary_cos, operands.rotary_sin
    if cos is None or sin is None:
        for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
            if x is None and cos is not sin:
                fail(ValueError, name, "both rotary_cos and rotary_sin, or neither", None)
        if q is not None:
            expected = "None without rotary_cos and rotary_sin"
            fail(ValueError, "q", expected, f"shape {q.shape}")
        return
    if cos.dtype not in ("float32", k_new.dtype):
        fail(TypeError, "rotary_cos", f"dtype float32 or k_new's {k_new.dtype}", cos.dtype)
    _check_dtype(sin, cos.dtype, "rotary_cos' ")
    if len(cos.shape) != 2 or cos.shape[0] < 1 or not 1 <= cos.shape[1] <= cache.head_dim // 2:
        expected = "shape (positions, R / 2) with R from 2 to k_pages' head dimension "
        fail(ValueError, "rotary_cos", f"{expected}{cache.head_dim}", cos.shape)
    if sin.shape != cos.shape:
        fail(ValueError, "rotary_sin", f"rotary_cos' shape {cos.shape}", sin.shape)
    for x in (cos, sin):
        _check_device(x, k_new)
        _check_rows(x)
    if q is None:
        return
    tokens = k_new.shape[:-2]
    heads = q.shape[-2] if len(q.shape) == len(k_new.shape) else None
    if heads is None or q.shape != (*tokens, heads, cache.head_dim):
        expected = f"shape ({', '.join(map(str, tokens))}, Hq, {cache.head_dim})"
        fail(ValueError, "q", expected, q.shape)
    _check_heads(q, cache)
    _check_dtype(q, k_new.dtype, "k_new's ")
    _check_device(q, k_new)
    _check_rows(q)


def _check_integer(name: str, value: Any, least: int, most: int, or_else: str = "") -> int:
    expected = f"{or_else}an integer from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        fail(TypeError, name, expected, _got(value, repr(value)))
    integer = int(value)
    if not least <= integer <= most:
        fail(ValueError, name, expected, integer)
    return integer


def check_heads(d_model: Any, num_heads: Any, num_heads_kv: Any) -> tuple[int, int]:
    """Check the sizes of a multi-head module; return the head dimension and the number of kv heads.

    Raises:
        TypeError: one is no integer.
        ValueError: one is less than 1, or does not divide what it has to.
        NotImplementedError: a head dimension that the kernels do not take.
    """
    for name, x in (("d_model", d_model), ("num_heads", num_heads)):
        _check_integer(name, x, 1, WINDOW_UNLIMITED)
    if d_model % num_heads:
        fail(ValueError, "num_heads", f"a divisor of d_model {d_model}", num_heads)
    head_dim = d_model // num_heads
    if not _is_head_dim(head_dim):
        expected = f"a number that makes d_model // num_heads {_HEAD_DIMS}"
        fail(NotImplementedError, "num_heads", expected, f"{num_heads}, which makes it {head_dim}")
    if num_heads_kv is None:
        return head_dim, num_heads
    _check_integer("num_heads_kv", num_heads_kv, 1, WINDOW_UNLIMITED, or_else="None or ")
    if num_heads % num_heads_kv:
        fail(ValueError, "num_heads_kv", f"a divisor of num_heads {num_heads}", num_heads_kv)
    return head_dim, num_heads_kv


def check_tokens(shape: tuple[int, ...], d_model: int) -> None:
    """Check the shape of what a multi-head module is called with.

    Raises:
        ValueError: it is not [B, S, d_model].
    """
    if len(shape) != 3 or shape[2] != d_model:
        fail(ValueError, "x", f"shape [B, S, d_model {d_model}]", tuple(shape))


def check_saved(dout: Operand, q: Operand, out: Operand, lse: Operand) -> None:
    """Refuse tensors that were saved for a backward and come back as others, but for their layout.

    Args:
        dout: the gradient of out, which has the dtype, shape and device of the forward's.
        q, out, lse: as they come back; q agrees with the other operands.
    """
    for x in (q, out):
        _check_dtype(x, dout.dtype, "the saved ")
    _check_dtype(lse, "float32", "the saved ")
    for x in (q, out, lse):
        _check_device(x, dout)
    *batch, rows, heads, _ = dout.shape
    for x, shape in ((out, dout.shape), (lse, (*batch, heads, rows))):
        if x.shape != shape:
            fail(ValueError, x.name, f"the saved shape {list(shape)}", list(x.shape))


def check_bias(shape: tuple[int, ...], whole: tuple[int, ...]) -> None:
    """Refuse the shape of a bias that does not broadcast to `whole`, [B, Hq, Sq, Skv].

    Raises:
        ValueError: it has another number of axes, or of one neither the size nor 1.
    """
    sizes = zip(shape, whole, strict=False)
    if len(shape) != 4 or any(n not in (1, size) for n, size in sizes):
        fail(ValueError, "bias", f"shape {whole}, or 1 in place of any of these", shape)


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Refuse a name that is not one of `choices` (None passes)."""
    if value is not None and value not in choices:
        fail(ValueError, name, "None or one of " + ", ".join(map(repr, choices)), repr(value))


def _check_qkv(
    operands: FlashOperands[Operand] | VarlenOperands[Operand] | BlockSparseOperands[Operand],
    layouts: tuple[str, str, str],
) -> None:
    q, k, v = operands.q, operands.k, operands.v
    for x, layout in zip((q, k, v), layouts, strict=True):
        rank = 1 + layout.count(",")
        if len(x.shape) != rank:
            fail(ValueError, x.name, f"{rank} dimensions {layout}", f"shape {tuple(x.shape)}")
    for x in (q, k, v):
        _check_float(x, DTYPES)
    for x in (k, v):
        _check_dtype(x, q.dtype, "q's ")
    for x in (k, v):
        _check_device(x, q)
    for x in (k, v):
        if x.shape[:-3] != q.shape[:-3]:
            fail(ValueError, x.name, f"q's batch size {q.shape[0]}", x.shape[0])
    if v.shape[-3] != k.shape[-3]:
        fail(ValueError, "v", f"k's length {k.shape[-3]}", v.shape[-3])
    if v.shape[-2] != k.shape[-2]:
        fail(ValueError, "v", f"k's {k.shape[-2]} heads", v.shape[-2])
    if k.shape[-1] != q.shape[-1]:
        fail(ValueError, "k", f"q's head dimension {q.shape[-1]}", k.shape[-1])
    heads_q, heads_kv = q.shape[-2], k.shape[-2]
    if (heads_kv == 0 and heads_q != 0) or (heads_kv != 0 and heads_q % heads_kv != 0):
        fail(ValueError, "q", f"a number of heads divisible by k's {heads_kv}", heads_q)
    for x in (q, v):
        _check_head_dim(x)
    for x in (q, k, v):
        _check_rows(x)


def _check_mask_axes(x: Operand, masks: tuple[int, ...], q: Operand) -> None:
    """Check how many masks there are, of sequences and of heads."""
    batch, _, heads, _ = q.shape
    if masks[0] not in (1, batch):
        fail(ValueError, x.name, f"masks of 1 or {batch} sequences", masks[0])
    if masks[1] not in (1, heads):
        fail(ValueError, x.name, f"masks of 1 or {heads} heads", masks[1])


def _check_number_of_tiles(x: Operand, tiles: int, length: int, what: str) -> None:
    if tile_size(length, tiles) is None:
        fits = dict.fromkeys(-(-length // size) for size in TILE_SIZES)
        expected = f"{' or '.join(map(str, fits))} tiles for {length} {what}"
        fail(ValueError, x.name, expected, tiles)


def _check_offsets(cu_seqlens_q: Operand, *others: Operand) -> None:
    for x in (cu_seqlens_q, *others):
        if len(x.shape) != 1 or x.shape[0] < 1:
            fail(ValueError, x.name, "shape (N + 1,) for N sequences", x.shape)
        _check_dtype(x, "int32")
        _check_rows(x)
    for x in others:
        if x.shape != cu_seqlens_q.shape:
            expected = f"cu_seqlens_q's {cu_seqlens_q.shape[0]} offsets"
            fail(ValueError, x.name, expected, x.shape[0])


def _check_sinks(
    operands: FlashOperands[Operand]
    | VarlenOperands[Operand]
    | BlockSparseOperands[Operand]
    | DecodeOperands[Operand]
    | PagedOperands[Operand],
) -> None:
    q, sinks = operands.q, operands.sinks
    if sinks is None:
        return
    _check_dtype(sinks, "float32")
    if sinks.shape != q.shape[-2:-1]:
        fail(ValueError, "sinks", f"shape {q.shape[-2:-1]}, one of each head", sinks.shape)
    _check_device(sinks, q)
    _check_rows(sinks)


def _check_segment_ids(operands: FlashOperands[Operand]) -> None:
    q_ids, kv_ids = operands.q_segment_ids, operands.kv_segment_ids
    if q_ids is None and kv_ids is None:
        return
    for name, x in (("q_segment_ids", q_ids), ("kv_segment_ids", kv_ids)):
        if x is None:
            fail(ValueError, name, "ids of queries and of keys, or of neither", None)
    assert q_ids is not None
    assert kv_ids is not None
    for x, of in ((q_ids, operands.q), (kv_ids, operands.k)):
        _check_of_tokens(x, of, operands.q)


def _check_tree(
    operands: FlashOperands[Operand] | VarlenOperands[Operand], options: FlashOptions
) -> None:
    q, k, ends = operands.q, operands.k, operands.kv_ends
    depths = (("q_depths", operands.q_depths, q), ("kv_depths", operands.kv_depths, k))
    if ends is None:
        for name, x, _ in depths:
            if x is not None:
                fail(ValueError, name, "None without kv_ends", f"shape {x.shape}")
        return
    _check_of_tokens(ends, k, q)
    if options.window_right != 0:
        fail(ValueError, "causal", "True with kv_ends", False)
    if operands.q_depths is None and operands.kv_depths is None:
        return
    for name, x, of in depths:
        if x is None:
            fail(ValueError, name, "depths of queries and of keys, or of neither", None)
        _check_of_tokens(x, of, q)


def _check_terms(operands: FlashOperands[Operand] | VarlenOperands[Operand], batch: int) -> None:
    """Check what is added to the scores of that many sequences."""
    q, table, slopes = operands.q, operands.relative_bias, operands.alibi_slopes
    heads = q.shape[-2]
    if table is not None:
        if table.dtype not in ("float32", q.dtype):
            fail(TypeError, table.name, f"dtype float32 or q's {q.dtype}", table.dtype)
        if len(table.shape) != 2 or table.shape[0] != heads or table.shape[1] % 2 == 0:
            expected = f"shape ({heads}, 2R + 1), of each head a value for each distance -R to R"
            fail(ValueError, table.name, expected, table.shape)
    if slopes is not None:
        _check_dtype(slopes, "float32")
        if slopes.shape not in ((heads,), (batch, heads)):
            expected = f"shape {(heads,)} or {(batch, heads)}, one of each head"
            fail(ValueError, slopes.name, expected, slopes.shape)
    for x in (table, slopes):
        if x is not None:
            _check_device(x, q)
            _check_rows(x)


def _check_bias(operands: FlashOperands[Operand]) -> None:
    q, k, bias = operands.q, operands.k, operands.bias
    if bias is None:
        return
    if bias.dtype not in ("float32", q.dtype):
        fail(TypeError, "bias", f"dtype float32 or q's {q.dtype}", bias.dtype)
    check_bias(bias.shape, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    _check_device(bias, q)
    _check_rows(bias)


def _check_dropout(
    operands: FlashOperands[Operand] | VarlenOperands[Operand], options: FlashOptions
) -> None:
    q, seed = operands.q, operands.dropout_seed
    if seed is None:
        if options.dropout_rate:
            fail(ValueError, "dropout_seed", "a seed with dropout_rate", None)
        return
    if seed.dtype not in ("int32", "uint32"):
        fail(TypeError, "dropout_seed", "dtype int32 or uint32", seed.dtype)
    if seed.shape != (2,):
        fail(ValueError, "dropout_seed", "shape (2,)", seed.shape)
    _check_device(seed, q)
    _check_rows(seed)


def _check_of_tokens(x: Operand, of: Operand, q: Operand) -> None:
    """Check an array that has an integer for each token of `of`."""
    _check_dtype(x, "int32")
    if x.shape != of.shape[:-2]:
        fail(ValueError, x.name, f"shape {of.shape[:-2]}, one of each token", x.shape)
    _check_device(x, q)
    _check_rows(x)


def _check_float(x: Operand, dtypes: tuple[str, ...]) -> None:
    if "float" not in x.dtype:
        fail(TypeError, x.name, "a floating-point dtype", x.dtype)
    if x.dtype not in dtypes:
        fail(NotImplementedError, x.name, "dtype " + ", ".join(dtypes), x.dtype)


def _check_dtype(x: Operand, dtype: str, whose: str = "") -> None:
    if x.dtype != dtype:
        fail(TypeError, x.name, f"{whose}dtype {dtype}", x.dtype)


def _check_device(x: Operand, other: Operand) -> None:
    if x.device is not None and other.device is not None and x.device != other.device:
        fail(ValueError, x.name, f"{other.name}'s device {other.device}", x.device)


def _check_head_dim(x: Operand) -> None:
    if not _is_head_dim(x.shape[-1]):
        fail(NotImplementedError, x.name, _HEAD_DIMS, x.shape[-1])


def _is_head_dim(size: int) -> bool:
    return size % HEAD_DIM_STEP == 0 and HEAD_DIM_MIN <= size <= HEAD_DIM_MAX


def _check_rows(x: Operand) -> None:
    if not x.contiguous_rows:
        fail(ValueError, x.name, "a contiguous last dimension", "a stride other than 1")


def _check_flag(name: str, value: Any, or_else: str = "") -> bool:
    if not isinstance(value, bool):
        fail(TypeError, name, f"{or_else}a bool", _got(value, type_name(value)))
    return value


def _check_rate(rate: Any) -> float:
    expected = "a number from 0 on that is less than 1"
    if isinstance(rate, bool) or not isinstance(rate, Real):
        fail(TypeError, "dropout_rate", expected, _got(rate, type_name(rate)))
    number = float(rate)
    if not 0 <= number < 1:
        fail(ValueError, "dropout_rate", expected, rate)
    return number


def _check_precision(precision: Any) -> Precision:
    if precision not in PRECISIONS:
        fail(ValueError, "precision", "one of " + ", ".join(map(repr, PRECISIONS)), repr(precision))
    return precision


def _resolve_scale(scale: Any) -> float | None:
    return None if scale is None else _check_number("scale", scale, "a finite number or None")


def _resolve_softcap(softcap: Any) -> float | None:
    if softcap is None:
        return None
    expected = "a positive number up to 2**100 or None"
    value = _check_number("softcap", softcap, expected)
    if not 0 < value <= 2.0**100:  # what a larger one divides would be flushed to 0
        fail(ValueError, "softcap", expected, softcap)
    return value


def _scale_within(scale: float | None, softcap: float | None) -> float | None:
    """Return the scale, or 0 where `scale / softcap` is below the normal numbers."""
    if scale is None or softcap is None:
        return scale
    tiny = 2.0**-126 * softcap
    return 0.0 if -tiny < scale < tiny else scale


def _check_number(name: str, value: Any, expected: str) -> float:
    """Check a number that kernels take as float32, where one below the normal numbers is 0.

    It keeps its own precision: `torch.compile` could not trace the rounding of a number that it
    does not know. Nor are the bounds globals, which it would take for such numbers.
    """
    infinite, tiny = 2.0**128 - 2.0**103, 2.0**-126  # what rounds to infinity; the least normal
    if isinstance(value, bool) or not isinstance(value, Real):
        fail(TypeError, name, expected, _got(value, type_name(value)))
    try:
        number = float(value)
    except OverflowError:  # an integer or a fraction
        number = math.inf
    if not -infinite < number < infinite:
        fail(ValueError, name, expected, value)
    return 0.0 if -tiny < number < tiny else number


def _resolve_window(window_size: Any) -> tuple[int | None, int | None]:
    if window_size is None:
        return None, None
    expected = "None or a pair (left, right) of non-negative integers or None"
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        fail(TypeError, "window_size", expected, repr(window_size))
    for side in window_size:
        if side is None:
            continue
        if isinstance(side, bool) or not isinstance(side, Integral):
            fail(TypeError, "window_size", expected, _got(side, repr(tuple(window_size))))
        if side < 0:
            fail(ValueError, "window_size", expected, repr(tuple(window_size)))
    left, right = (
        None if side is None or side >= WINDOW_UNLIMITED else int(side) for side in window_size
    )
    return left, right
