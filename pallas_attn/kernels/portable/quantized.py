"""How a cache holds numbers in 8 bits: int8, and float8_e4m3fn."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from twin_attention.targets import ptx

FLOAT8_MAX = 448.0  # the largest float8_e4m3fn
ROUND_TO_INTEGER = 12582912.0  # 1.5 * 2^23: adding it rounds away the fraction
ROUND_TO_INTEGER_BITS = 0x4B400000


def as_words(pages):
    """A pool of 8-bit numbers as words of two columns. XLA copies nothing for it."""
    *rows, size = pages.shape
    return lax.bitcast_convert_type(pages.reshape(*rows, size // 2, 2), jnp.int16)


def unpack(words, float8, codes):
    """The numbers in the low and in the high bytes of int16 words, as float16, exactly.

    They are not yet times the cache's scale. codes: what `twin_attention.targets.ptx.widenings`
    gives, or None to do without, as the interpreter must.
    """
    if codes is None:
        low, high = words.astype(jnp.int8), (words >> 8).astype(jnp.int8)
        return widen(low, float8), widen(high, float8)
    return [
        elementwise(code, ptx.WIDEN_CONSTRAINTS, ptx.WIDEN_PACK, jnp.float16, words)
        for code in codes
    ]


def widen(x, float8):
    """int8, or the bits of a float8_e4m3fn, as float16.

    The bits of a float8 below its sign, moved to float16's, are the number times 2^-8.
    """
    if float8:
        magnitude = x.astype(jnp.int16) & 0x7F
        bits = (x.astype(jnp.int16) & 0x80) << 8 | magnitude << 7
        y = lax.bitcast_convert_type(bits, jnp.float16) * jnp.float16(256)
        x = jnp.where(magnitude == 0x7F, jnp.float16(float("nan")), y)
    return x.astype(jnp.float16)


def to_float16(x, y):
    """Two tiles of the same rows as float16, and what a row's elements are to be multiplied by.

    A row of bfloat16 may be past float16's range. It is multiplied by the power of two that brings
    its largest element to 2^13 .. 2^14: exact but for elements below 2^-31 of that one.
    """
    factor = jnp.ones(x.shape[0], jnp.float32)
    if x.dtype == jnp.bfloat16:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        largest = jnp.maximum(jnp.max(jnp.abs(x), 1), jnp.max(jnp.abs(y), 1))
        exponent = lax.bitcast_convert_type(largest, jnp.int32) >> 23
        exponent = jnp.minimum(jnp.maximum(exponent, 14), 253)
        factor = lax.bitcast_convert_type((exponent - 13) << 23, jnp.float32)
        inverse = lax.bitcast_convert_type((267 - exponent) << 23, jnp.float32)[:, None]
        x, y = x * inverse, y * inverse
    return x.astype(jnp.float16), y.astype(jnp.float16), factor


def divide(x, y, compiled):
    """float32 x / y, rounded to nearest, as Triton compiles no division by itself."""
    if not compiled:
        return x / y
    return elementwise(ptx.DIVIDE, ptx.DIVIDE_CONSTRAINTS, 1, jnp.float32, x, y)


def elementwise(code, constraints, pack, dtype, *args):
    """What the code's only output is, element by element."""
    result = jax.ShapeDtypeStruct(args[0].shape, dtype)
    (out,) = plt.elementwise_inline_asm(
        code, args=args, constraints=constraints, pack=pack, result_shape_dtypes=[result]
    )
    return out


def round_to_integer(x):
    """float32 below 2^22 as int32, to nearest, ties to even.

    The sum's last bits are the integer. Subtracting the constant again would do, but XLA folds it.
    """
    bits = lax.bitcast_convert_type(x + ROUND_TO_INTEGER, jnp.int32)
    return bits - ROUND_TO_INTEGER_BITS


def quantize(x, dtype):
    """float32 as int8 or float8_e4m3fn; to nearest, ties to even.

    A NaN becomes 0 in int8 and stays NaN in float8_e4m3fn.
    """
    if dtype == jnp.int8:
        x = jnp.where(x == x, x, 0.0)
        x = jnp.minimum(jnp.maximum(x, -127.0), 127.0)
        return round_to_integer(x).astype(jnp.int8)
    sign = (x < 0).astype(jnp.int32) << 7
    magnitude = jnp.minimum(jnp.abs(x), FLOAT8_MAX)
    bits = lax.bitcast_convert_type(magnitude, jnp.int32)
    # A normal number: round off 20 of 23 bits, then move the exponent's bias from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6, a multiple of 2^-9.
    tiny = round_to_integer(magnitude * 512.0)
    y = sign | jnp.where(magnitude < 0.015625, tiny, normal)
    return lax.bitcast_convert_type(jnp.where(x == x, y, 0x7F).astype(jnp.uint8), dtype)
