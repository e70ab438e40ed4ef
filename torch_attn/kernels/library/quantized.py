"""8-bit caches: int8, and float8_e4m3fn as its bits (uint8).

A decode reads packed pairs: each int16 holds two columns. Upcast to float16, the even and the odd
columns form two tiles, and so do q and the output. A 16-bit cache has one tile, and an UPCAST
(`twin_attention.targets.ptx.Upcast`) of None.

In a latent cache k and q have as many further tiles, of the columns after the values'. k's first
tiles are v's, so each key is loaded once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_attn.kernels.library.pages import load_rows_at, store_rows_at
from torch_attn.kernels.library.scores import attention_scores
from torch_attn.kernels.library.softmax import add_sink, row_statistics
from torch_attn.operands import strides_in_memory
from twin_attention.contract.paged_spec import PagedCache
from twin_attention.targets import ptx

FLOAT8_MAX = tl.constexpr(448.0)  # the largest float8_e4m3fn
# 1.5 * 2^23 + 2: adding it rounds away the fraction. Without the 2, the compiler would take an int8
# from the float sum's bits, but ptxas 12.8 and 12.9 convert the sum.
ROUND_TO_INTEGER = tl.constexpr(12582914.0)
ROUND_TO_INTEGER_BITS = tl.constexpr(0x4B400002)
UPCAST_CONSTRAINTS = tl.constexpr(ptx.UPCAST_CONSTRAINTS)
UPCAST_PACK = tl.constexpr(ptx.UPCAST_PACK)


def as_packed(pages: Tensor) -> Tensor:
    """Return an 8-bit pool as packed pairs of columns, int16."""
    strides = strides_in_memory(pages)
    if strides != pages.stride():  # `view` minds the stride of an axis of size 1
        pages = pages.as_strided(pages.shape, strides)
    return pages.view(torch.int16)


def with_packed_pools(operands: Any, cache: PagedCache) -> Any:
    if not cache.is_quantized:
        return operands
    v_pages = None if operands.v_pages is None else as_packed(operands.v_pages)
    return operands._replace(k_pages=as_packed(operands.k_pages), v_pages=v_pages)


def as_bits(pages: Tensor) -> Tensor:
    """Return a float8 pool as uint8; Triton has no float8 on SM80."""
    return pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn else pages


def swizzled_alike(block_dv: int, block_d: int) -> int:
    """Return the padded columns of a packed tile of v that wgmma reads as it reads another tile.

    Tiles of k and v share memory in turn. If their swizzles differ (up to 64 columns of float16),
    ptxas 12.8 of Triton 3.6 takes v's address from a register that was never written. Can go with
    Triton 3.6.
    """
    return max(block_dv, min(block_d, 64))


@triton.jit
def locate_pools(cache, head_kv, scale):
    """Return where a head's keys and values begin, and the scale of its scores with the cache's."""
    k_base = cache.k + head_kv * cache.k_strides.head
    v_base = k_base
    if cache.v is not None:
        v_base = cache.v + head_kv * cache.v_strides.head
    if cache.k_scale is not None:
        scale *= tl.load(cache.k_scale + head_kv * cache.k_scale_stride)
    return k_base, v_base, scale


@triton.jit
def load_q(
    base, index, strides, is_row, scale, cache, SIZE: tl.constexpr, SIZE_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_V: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Return q's tiles, of the keys' columns, and the scale of each row's scores."""
    if cache.v is None:
        q = _load_columns(base, index, strides, is_row, SIZE_V, BLOCK_V, 0, UPCAST)
        if SIZE > SIZE_V:
            q = q + _load_columns(
                base, index, strides, is_row, SIZE - SIZE_V, BLOCK_SIZE, SIZE_V, UPCAST
            )
    else:
        q = _load_columns(base, index, strides, is_row, SIZE, BLOCK_SIZE, 0, UPCAST)
    if UPCAST is not None:
        q, factor = to_float16(q)
        scale = scale * factor[:, None]
    return q, scale


@triton.jit
def _load_columns(
    base, index, strides, is_row, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FIRST: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    if UPCAST is None:
        q = (load_rows_at(base, index, strides, is_row, SIZE, BLOCK_SIZE, FIRST),)
    else:
        even = load_rows_at(base, index, strides, is_row, SIZE, BLOCK_SIZE, 2 * FIRST, 2)
        odd = load_rows_at(base, index, strides, is_row, SIZE, BLOCK_SIZE, 2 * FIRST + 1, 2)
        q = (even, odd)
    return q


@triton.jit
def load_keys(
    base, index, cache, exists, SIZE: tl.constexpr, SIZE_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_V: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Return keys' tiles, without the cache's scale."""
    strides = cache.k_strides
    if cache.v is None:
        k = unpack(load_rows_at(base, index, strides, exists, SIZE_V, BLOCK_V), UPCAST)
        if SIZE > SIZE_V:
            rest = load_rows_at(base, index, strides, exists, SIZE - SIZE_V, BLOCK_SIZE, SIZE_V)
            k = k + unpack(rest, UPCAST)
    else:
        k = unpack(load_rows_at(base, index, strides, exists, SIZE, BLOCK_SIZE), UPCAST)
    return k


@triton.jit
def load_values(
    base, index, cache, exists, k, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Return values' tiles, without the cache's scale: loaded, or the keys' first ones."""
    if cache.v is None:
        v = k
    else:
        v = unpack(load_rows_at(base, index, cache.v_strides, exists, SIZE, BLOCK_SIZE), UPCAST)
    return v


@triton.jit
def no_keys(ROWS: tl.constexpr, SIZE: tl.constexpr, UPCAST: tl.constexpr):
    """Return a running softmax over no key: maxima in base 2, sums, and sums of values."""
    m_i, l_i = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    zero = tl.zeros([ROWS, SIZE], tl.float32)
    acc = (zero,)
    if UPCAST is not None:
        acc = (zero, zero)
    return m_i, l_i, acc


@triton.jit
def unpack(x, UPCAST: tl.constexpr):
    """Return loaded keys or values as tiles, without the cache's scale."""
    if UPCAST is None:
        tiles = (x,)
    elif UPCAST.low is None:
        low, high = x.to(tl.int8), (x >> 8).to(tl.int8)
        tiles = (upcast_bytes(low, UPCAST.float8), upcast_bytes(high, UPCAST.float8))
    else:
        low = tl.inline_asm_elementwise(
            UPCAST.low, UPCAST_CONSTRAINTS, [x], tl.float16, is_pure=True, pack=UPCAST_PACK
        )
        high = tl.inline_asm_elementwise(
            UPCAST.high, UPCAST_CONSTRAINTS, [x], tl.float16, is_pure=True, pack=UPCAST_PACK
        )
        tiles = (low, high)
    return tiles


@triton.jit
def scores(q, k, scale, softcap, SCALE_FIRST: tl.constexpr, added=None):
    more = None
    for i in tl.static_range(1, len(q)):
        more = tl.dot(q[i], tl.trans(k[i]), more)
    return attention_scores(q[0], k[0], scale, softcap, SCALE_FIRST, "ieee", more, added)


@triton.jit
def add_pv(acc, p, v):
    if len(acc) == 1:
        acc = (tl.dot(p, v[0], acc[0]),)
    else:
        acc = (tl.dot(p, v[0], acc[0]), tl.dot(p, v[1], acc[1]))
    return acc


@triton.jit
def normalise(acc, m_i, l_i, sink, cache, head_kv, ADDED: tl.constexpr):
    """Return out's tiles, with the cache's scale, and lse; sink is None, or one of each row."""
    if sink is not None:
        alpha, m_i, l_i = add_sink(sink, m_i, l_i, ADDED)
        acc = [x * alpha[:, None] for x in acc]
    l_safe, lse = row_statistics(m_i, l_i, ADDED)
    out = [x / l_safe[:, None] for x in acc]
    if cache.v_scale is not None:
        v_scale = tl.load(cache.v_scale + head_kv * cache.v_scale_stride)
        out = [x * v_scale for x in out]
    return out, lse


@triton.jit
def store_out(base, out, index, strides, is_row, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    for half in tl.static_range(len(out)):
        store_rows_at(base, out[half], index, strides, is_row, SIZE, BLOCK_SIZE, half, len(out))


@triton.jit
def add_stored(
    out, base, index, strides, is_row, factor, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Return out plus factor times what `store_out` stored."""
    even = load_rows_at(base, index, strides, is_row, SIZE, BLOCK_SIZE, 0, len(out))
    if len(out) == 1:
        out = (out[0] + even * factor[:, None],)
    else:
        odd = load_rows_at(base, index, strides, is_row, SIZE, BLOCK_SIZE, 1, len(out))
        out = (out[0] + even * factor[:, None], out[1] + odd * factor[:, None])
    return out


@triton.jit
def upcast_bytes(x, FLOAT8: tl.constexpr):
    """Return int8 as float16, or a float8_e4m3fn's shifted bits: the number times 2^-8."""
    if FLOAT8:
        magnitude = x.to(tl.int16) & 0x7F
        bits = (x.to(tl.int16) & 0x80) << 8 | magnitude << 7
        y = bits.to(tl.float16, bitcast=True) * 256.0
        x = tl.where(magnitude == 0x7F, float("nan"), y)
    return x.to(tl.float16)


@triton.jit
def to_float16(tiles):
    """Return tiles of the same rows as float16, and the factor that divided each row.

    A bfloat16 row may exceed float16's range, so a power of two brings its largest element to
    2^13 .. 2^14, exactly except below 2^-31 of it.
    """
    factor = tl.full([tiles[0].shape[0]], 1.0, tl.float32)
    if tiles[0].dtype == tl.bfloat16:
        tiles = [x.to(tl.float32) for x in tiles]
        largest = tl.max(tl.abs(tiles[0]), 1)
        for i in tl.static_range(1, len(tiles)):
            largest = tl.maximum(largest, tl.max(tl.abs(tiles[i]), 1))
        exponent = largest.to(tl.int32, bitcast=True) >> 23
        exponent = tl.minimum(tl.maximum(exponent, 14), 253)
        factor = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
        inverse = ((267 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
        tiles = [x * inverse for x in tiles]
    return [x.to(tl.float16) for x in tiles], factor


@triton.jit
def round_to_integer(x):
    """Round float32 below 2^22 to int32, ties to even."""
    return (x + ROUND_TO_INTEGER).to(tl.int32, bitcast=True) - ROUND_TO_INTEGER_BITS


@triton.jit
def quantize(x, scale, dtype: tl.constexpr):
    """Round x / scale to int8 (NaN to 0), or to bits of a float8_e4m3fn; ties to even."""
    x = tl.div_rn(x.to(tl.float32), scale)
    if dtype == tl.int8:
        x = tl.where(x == x, x, 0.0)
        x = tl.minimum(tl.maximum(x, -127.0), 127.0)
        y = round_to_integer(x).to(tl.int8)
    else:
        sign = (x < 0).to(tl.int32) << 7
        magnitude = tl.minimum(tl.abs(x), FLOAT8_MAX)
        bits = magnitude.to(tl.int32, bitcast=True)
        # Normal: round off 20 of 23 bits, then change the exponent's bias from 127 to 7.
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        # Below 2^-6: round to a multiple of 2^-9.
        tiny = round_to_integer(magnitude * 512.0)
        y = sign | tl.where(magnitude < 0.015625, tiny, normal)
        y = tl.where(x == x, y, 0x7F).to(tl.uint8)
    return y
