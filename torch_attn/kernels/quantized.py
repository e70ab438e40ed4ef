"""How a cache holds numbers in 8 bits: int8, and float8_e4m3fn as its bits (uint8)."""

import triton
import triton.language as tl

from interop.contract import ptx

FLOAT8_MAX = tl.constexpr(448.0)  # the largest float8_e4m3fn
ROUND_TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds away the fraction
ROUND_TO_INTEGER_BITS = tl.constexpr(0x4B400000)
WIDEN_CONSTRAINTS = tl.constexpr(ptx.WIDEN_CONSTRAINTS)
WIDEN_PACK = tl.constexpr(ptx.WIDEN_PACK)


@triton.jit
def unpack(
    words,
    dtype: tl.constexpr,
    FLOAT8: tl.constexpr,
    WIDEN_LOW: tl.constexpr,
    WIDEN_HIGH: tl.constexpr,
):
    """The numbers in the low and in the high bytes of int16 words, in `dtype`, exactly.

    The codes are what `interop.contract.ptx.widenings` gives, or None to do without, as the
    interpreter must.
    """
    if WIDEN_LOW is None:
        low = dequantize(words.to(tl.int8), dtype, FLOAT8)
        high = dequantize((words >> 8).to(tl.int8), dtype, FLOAT8)
    else:
        low = tl.inline_asm_elementwise(
            WIDEN_LOW, WIDEN_CONSTRAINTS, [words], dtype.value, is_pure=True, pack=WIDEN_PACK
        )
        high = tl.inline_asm_elementwise(
            WIDEN_HIGH, WIDEN_CONSTRAINTS, [words], dtype.value, is_pure=True, pack=WIDEN_PACK
        )
    return low, high


@triton.jit
def dequantize(x, dtype: tl.constexpr, FLOAT8: tl.constexpr):
    """int8, or the bits of a float8_e4m3fn, in `dtype`; not yet times the cache's scale.

    The bits of a float8 below its sign, moved to float16's, are the number times 2^-8.
    """
    if FLOAT8:
        magnitude = x.to(tl.int16) & 0x7F
        bits = (x.to(tl.int16) & 0x80) << 8 | magnitude << 7
        y = bits.to(tl.float16, bitcast=True) * 256.0
        x = tl.where(magnitude == 0x7F, float("nan"), y).to(tl.float16)
    return x.to(dtype)


@triton.jit
def round_to_integer(x):
    """float32 below 2^22 as int32, to nearest, ties to even."""
    return (x + ROUND_TO_INTEGER).to(tl.int32, bitcast=True) - ROUND_TO_INTEGER_BITS


@triton.jit
def quantize(x, dtype: tl.constexpr):
    """float32 as int8, or as the bits of a float8_e4m3fn (uint8); to nearest, ties to even."""
    if dtype == tl.int8:
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
