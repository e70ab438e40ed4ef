from __future__ import annotations

from twin_attention.contract.operands import AppendOperands, DecodeOperands, PagedOperands
from twin_attention.contract.paged_spec import (
    DECODE_DTYPES,
    LATENT_DIM_MAX,
    QUANTIZED_DTYPES,
    TOKENS_MAX,
    AppendSpec,
    DecodeOptions,
    DecodeSpec,
    PagedCache,
    PagedSpec,
)
from twin_attention.contract.spec import HEAD_DIM_MAX
from twin_attention.contract.validate.attention import check_ranges_of
from twin_attention.contract.validate.errors import fail
from twin_attention.contract.validate.offsets import check_offset_operands
from twin_attention.contract.validate.operands import (
    Operand,
    check_device,
    check_dtype,
    check_float,
    check_head_dim,
    check_rows,
    check_sinks,
    check_slopes,
    head_dims,
    is_head_dim,
)
from twin_attention.contract.validate.pool import check_pool, check_tables


def check_paged_decode(operands: DecodeOperands[Operand], options: DecodeOptions) -> DecodeSpec:
    q = operands.q
    if len(q.shape) not in (3, 4):
        expected = "3 or 4 dimensions [B, Hq, D] or [B, T, Hq, D]"
        fail(ValueError, q.name, expected, f"shape {q.shape}")
    cache = _check_cache(q, operands, *q.shape[:-2], options=options)
    _check_queries(operands, cache)
    check_slopes(operands, q.shape[0])
    batch, *tokens = q.shape[:-2]
    _check_tree_ends(operands, (batch, *(tokens or (1,))), options)
    return DecodeSpec.of(operands, q.dtype, cache.dtype, options)


def check_paged_attention(operands: PagedOperands[Operand], options: DecodeOptions) -> PagedSpec:
    q, offsets = operands.q, operands.cu_seqlens_q
    if len(q.shape) != 3:
        fail(ValueError, q.name, "3 dimensions [Tq, Hq, D]", f"shape {q.shape}")
    check_offset_operands(offsets)
    cache = _check_cache(q, operands, offsets.shape[0] - 1, options=options)
    check_device(offsets, q)
    _check_queries(operands, cache)
    check_slopes(operands, offsets.shape[0] - 1)
    _check_tree_ends(operands, q.shape[:1], options)
    check_ranges_of(operands)
    return PagedSpec.of(operands, q.dtype, cache.dtype, options)


def check_append_kv(operands: AppendOperands[Operand], interleaved: bool) -> AppendSpec:
    k_new, v_new, offsets = operands.k_new, operands.v_new, operands.cu_seqlens_q
    if offsets is not None:
        if len(k_new.shape) != 3:
            expected = "3 dimensions [Tq, Hkv, D] with cu_seqlens_q"
            fail(ValueError, k_new.name, expected, f"shape {k_new.shape}")
        check_offset_operands(offsets)
        cache = _check_cache(k_new, operands, offsets.shape[0] - 1)
        check_device(offsets, k_new)
    else:
        if len(k_new.shape) not in (3, 4):
            expected = "3 or 4 dimensions [B, Hkv, D] or [B, T, Hkv, D]"
            fail(ValueError, k_new.name, expected, f"shape {k_new.shape}")
        cache = _check_cache(k_new, operands, *k_new.shape[:-2])
    if (v_new is None) != cache.latent:
        expected = "None without v_pages" if cache.latent else "new values for v_pages"
        fail(ValueError, "v_new", expected, None if v_new is None else f"shape {v_new.shape}")
    expected = (*k_new.shape[:-2], cache.heads)
    for x, size in ((k_new, cache.head_dim), (v_new, cache.head_dim_v)):
        if x is not None and x.shape != (*expected, size):
            fail(ValueError, x.name, f"shape {(*expected, size)}", x.shape)
    if v_new is not None:
        check_dtype(v_new, k_new.dtype, "k_new's ")
        check_device(v_new, k_new)
        check_rows(v_new)
    _check_scales(cache, k_new, operands)
    _check_rotary(operands, cache)
    return AppendSpec.of(operands, k_new.dtype, cache.dtype, interleaved)


def _check_value_dim(
    operands: DecodeOperands[Operand] | PagedOperands[Operand] | AppendOperands[Operand],
    value_dim: int | None,
) -> int | None:
    """Check that there is either a pool of values or `value_dim`, and return that."""
    head_dim = operands.k_pages.shape[-1]
    if operands.v_pages is None:
        if value_dim is None:
            expected = "a pool [P, page_size, Hkv, Dv], or None with value_dim"
            fail(ValueError, "v_pages", expected, None)
        if value_dim > head_dim:
            fail(ValueError, "value_dim", f"at most k_pages' head dimension {head_dim}", value_dim)
        if not is_head_dim(value_dim):
            fail(NotImplementedError, "value_dim", head_dims(), value_dim)
    elif value_dim is not None:
        fail(ValueError, "value_dim", "None beside v_pages", value_dim)
    return value_dim


def _check_cache(
    new: Operand,
    operands: DecodeOperands[Operand] | PagedOperands[Operand] | AppendOperands[Operand],
    batch: int,
    tokens: int = 1,
    *,
    options: DecodeOptions | None = None,
) -> PagedCache:
    """Check what all functions of a paged cache take; `new` is q, or the new keys."""
    k_pages, v_pages = operands.k_pages, operands.v_pages
    block_tables, seq_lens = operands.block_tables, operands.seq_lens
    check_pool(k_pages)
    value_dim = None if options is None else _check_value_dim(operands, options.value_dim)
    if v_pages is not None and len(v_pages.shape) != 4:
        expected = "4 dimensions [P, page_size, Hkv, Dv]"
        fail(ValueError, "v_pages", expected, f"shape {v_pages.shape}")
    check_float(new, DECODE_DTYPES)
    if k_pages.dtype not in (new.dtype, *QUANTIZED_DTYPES):
        choices = ", ".join((f"{new.name}'s {new.dtype}", *QUANTIZED_DTYPES))
        fail(TypeError, "k_pages", choices, k_pages.dtype)
    pools = (k_pages,) if v_pages is None else (k_pages, v_pages)
    if v_pages is not None:
        check_dtype(v_pages, k_pages.dtype, "k_pages' ")
        if v_pages.shape[:3] != k_pages.shape[:3]:
            expected = f"k_pages' pages, page size and heads {k_pages.shape[:3]}"
            fail(ValueError, "v_pages", expected, v_pages.shape[:3])
    for x in pools:
        check_head_dim(x, LATENT_DIM_MAX if v_pages is None else HEAD_DIM_MAX)
    if tokens > TOKENS_MAX:
        fail(NotImplementedError, new.name, f"at most {TOKENS_MAX} new tokens", tokens)
    check_tables(k_pages, block_tables, seq_lens, batch)
    for x in (*pools, block_tables, seq_lens):
        check_device(x, new)
    for x in (new, *pools, block_tables, seq_lens):
        check_rows(x)
    for x in pools:
        # The kernels read them two columns at a time.
        if x.dtype in QUANTIZED_DTYPES and not x.even_rows:
            fail(ValueError, x.name, "rows at even offsets in an 8-bit cache", "an odd one")
    return PagedCache.of(operands, k_pages.dtype, value_dim)


def _check_queries(
    operands: DecodeOperands[Operand] | PagedOperands[Operand], cache: PagedCache
) -> None:
    head_dim = operands.q.shape[-1]
    if head_dim != cache.head_dim:
        fail(ValueError, "q", f"k_pages' head dimension {cache.head_dim}", head_dim)
    _check_heads(operands.q, cache)
    _check_scales(cache, operands.q, operands)
    check_sinks(operands)


def _check_tree_ends(
    operands: DecodeOperands[Operand] | PagedOperands[Operand],
    shape: tuple[int, ...],
    options: DecodeOptions,
) -> None:
    x = operands.tree_ends
    if x is None:
        return
    check_dtype(x, "int32")
    if x.shape != shape:
        fail(ValueError, "tree_ends", f"shape {shape}, one of each new token", x.shape)
    check_device(x, operands.q)
    check_rows(x)
    if options.window_left is not None:  # undecided: would it count positions or depths?
        expected = "no window to the left with tree_ends"
        fail(NotImplementedError, "window_size", expected, options.window_left)
    if operands.alibi_slopes is not None:  # likewise
        shape = operands.alibi_slopes.shape
        fail(NotImplementedError, "alibi_slopes", "None with tree_ends", f"shape {shape}")


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
        if cache.latent and name == "v_scale":
            if x is not None:
                fail(ValueError, name, "None without v_pages", f"shape {x.shape}")
            continue
        if x is None:
            fail(ValueError, name, f"a scale for a cache in {cache.dtype}", None)
        check_dtype(x, "float32")
        if x.shape not in ((), (cache.heads,)):
            expected = f"shape () or {(cache.heads,)}, one of all heads or of each kv head"
            fail(ValueError, name, expected, x.shape)
        check_device(x, new)
        check_rows(x)


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
    check_dtype(sin, cos.dtype, "rotary_cos' ")
    if len(cos.shape) != 2 or cos.shape[0] < 1 or not 1 <= cos.shape[1] <= cache.head_dim // 2:
        expected = "shape (positions, R / 2) with R from 2 to k_pages' head dimension "
        fail(ValueError, "rotary_cos", f"{expected}{cache.head_dim}", cos.shape)
    if sin.shape != cos.shape:
        fail(ValueError, "rotary_sin", f"rotary_cos' shape {cos.shape}", sin.shape)
    for x in (cos, sin):
        check_device(x, k_new)
        check_rows(x)
    if q is None:
        return
    tokens = k_new.shape[:-2]
    heads = q.shape[-2] if len(q.shape) == len(k_new.shape) else None
    if heads is None or q.shape != (*tokens, heads, cache.head_dim):
        expected = f"shape ({', '.join(map(str, tokens))}, Hq, {cache.head_dim})"
        fail(ValueError, "q", expected, q.shape)
    _check_heads(q, cache)
    check_dtype(q, k_new.dtype, "k_new's ")
    check_device(q, k_new)
    check_rows(q)
