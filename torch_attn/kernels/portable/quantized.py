"""How a cache holds numbers in 8 bits: int8, and float8_e4m3fn as its bits (uint8)."""

import triton
import triton.language as tl

from twin_attention.targets import ptx

FLOAT8_MAX = tl.constexpr(448.0)  # the largest float8_e4m3fn
ROUND_TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds away the fraction
ROUND_TO_INTEGER_BITS = tl.constexpr(0x4B400000)
WIDEN_CONSTRAINTS = tl.constexpr(ptx.WIDEN_CONSTRAINTS)
WIDEN_PACK = tl.constexpr(ptx.WIDEN_PACK)


@triton.jit
def unpack(words, FLOAT8: tl.constexpr, WIDEN_LOW: tl.constexpr, WIDEN_HIGH: tl.constexpr):
    """The numbers in the low and in the high bytes of int16 words, as float16, exactly.

    They are not yet times the cache's scale. The codes are what
    `twin_attention.targets.ptx.widenings` gives, or None to do without, as the interpreter must.
    """
    if WIDEN_LOW is None:
        low, high = widen(words.to(tl.int8), FLOAT8), widen((words >> 8).to(tl.int8), FLOAT8)
    else:
        low = tl.inline_asm_elementwise(
            WIDEN_LOW, WIDEN_CONSTRAINTS, [words], tl.float16, is_pure=True, pack=WIDEN_PACK
        )
        high = tl.inline_asm_elementwise(
            WIDEN_HIGH, WIDEN_CONSTRAINTS, [words], tl.float16, is_pure=True, pack=WIDEN_PACK
        )
    return low, high


@triton.jit
def widen(x, FLOAT8: tl.constexpr):
    """int8, or the bits of a float8_e4m3fn, as float16.

    The bits of a float8 below its sign, moved to float16's, are the number times 2^-8.
    """
    if FLOAT8:
        magnitude = x.to(tl.int16) & 0x7F
        bits = (x.to(tl.int16) & 0x80) << 8 | magnitude << 7
        y = bits.to(tl.float16, bitcast=True) * 256.0
        x = tl.where(magnitude == 0x7F, float("nan"), y)
    return x.to(tl.float16)


@triton.jit
def to_float16(x, y):
    """Two tiles of the same rows as float16, and what a row's elements are to be multiplied by.

    A row of bfloat16 may be past float16's range. It is multiplied by the power of two that brings
    its largest element to 2^13 .. 2^14: exact but for elements below 2^-31 of that one.
    """
    factor = tl.full([x.shape[0]], 1.0, tl.float32)
    if x.dtype == tl.bfloat16:
        x, y = x.to(tl.float32), y.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(y), 1))
        exponent = largest.to(tl.int32, bitcast=True) >> 23
        exponent = tl.minimum(tl.maximum(exponent, 14), 253)
        factor = ((exponent - 13) << 23).to(tl.float32, bitcast=True)
        inverse = ((267 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
        x, y = x * inverse, y * inverse
    return x.to(tl.float16), y.to(tl.float16), factor


@triton.jit
def round_to_integer(x):
    """float32 below 2^22 as int32, to nearest, ties to even."""
    return (x + ROUND_TO_INTEGER).to(tl.int32, bitcast=True) - ROUND_TO_INTEGER_BITS


@triton.jit
def quantize(x, dtype: tl.constexpr):
    """float32 as int8, or as the bits of a float8_e4m3fn (uint8); to nearest, ties to even.

    A NaN becomes 0 in int8 and stays NaN in float8_e4m3fn.
    """
    if dtype == tl.int8:
        x = tl.where(x == x, x, 0.0)
        x = tl.minimum(tl.maximum(x, -127.0), 127.0)
        y = round_to_integer(x).to(tl.int8)
    else:
        sign = (x < 0).to(tl.int32) << 7
        magnitude = tl.minimum(tl.abs(x), FLOAT8_MAX)
        bits = magnitude.to(tl.int32, bitcast=True)
        # A normal number: round off 20 of 23 bits, then move the exponent's bias from 127 to 7.
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        # Below 2^-6, a multiple of 2^-9.
        tiny = round_to_integer(magnitude * 512.0)
        y = sign | tl.where(magnitude < 0.015625, tiny, normal)
        y = tl.where(x == x, y, 0x7F).to(tl.uint8)
    return y
