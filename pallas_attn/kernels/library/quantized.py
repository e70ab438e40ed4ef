"""8-bit caches: int8, and float8_e4m3fn.

Helpers of the decode use lists of tiles, the twin's tuples. A latent cache has no v_ref.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from pallas_attn.kernels.library.pages import load_rows_at, store_rows_at
from pallas_attn.kernels.library.scores import attention_scores, dot
from pallas_attn.kernels.library.softmax import add_sink, row_statistics
from twin_attention.targets import ptx

FLOAT8_MAX = 448.0  # the largest float8_e4m3fn
# The twin says why.
ROUND_TO_INTEGER = 12582914.0
ROUND_TO_INTEGER_BITS = 0x4B400002


def as_packed(pages):
    *rows, size = pages.shape
    return lax.bitcast_convert_type(pages.reshape(*rows, size // 2, 2), jnp.int16)


def with_packed_pools(operands, cache):
    if not cache.is_quantized:
        return operands
    v_pages = None if operands.v_pages is None else as_packed(operands.v_pages)
    return operands._replace(k_pages=as_packed(operands.k_pages), v_pages=v_pages)


def load_q(ref, index, is_row, scale, v_ref, size, size_v, block_size, block_v, upcast):
    q, step = [], 1 if upcast is None else 2
    for first, *columns in _columns(v_ref, size, size_v, block_size, block_v):
        q += [
            load_rows_at(ref, index, is_row, *columns, step * first + half, step)
            for half in range(step)
        ]
    if upcast is not None:
        q, factor = to_float16(q)
        scale = scale * factor[:, None]
    return q, scale


def load_keys(ref, index, v_ref, exists, size, size_v, block_size, block_v, upcast):
    k = []
    for first, *columns in _columns(v_ref, size, size_v, block_size, block_v):
        k += unpack(load_rows_at(ref, index, exists, *columns, first), upcast)
    return k


def _columns(v_ref, size, size_v, block_size, block_v):
    if v_ref is not None:
        return [(0, size, block_size)]
    rest = [(size_v, size - size_v, block_size)] if size > size_v else []
    return [(0, size_v, block_v), *rest]


def load_values(ref, index, exists, k, size, block_size, upcast):
    if ref is None:
        return k[: 1 if upcast is None else 2]
    return unpack(load_rows_at(ref, index, exists, size, block_size), upcast)


def no_keys(rows, size, upcast):
    m_i, l_i = jnp.full((rows,), float("-inf"), jnp.float32), jnp.zeros((rows,), jnp.float32)
    acc = [jnp.zeros((rows, size), jnp.float32) for _ in range(1 if upcast is None else 2)]
    return m_i, l_i, acc


def unpack(x, upcast):
    if upcast is None:
        tiles = [x]
    elif upcast.low is None:
        low, high = x.astype(jnp.int8), (x >> 8).astype(jnp.int8)
        tiles = [upcast_bytes(low, upcast.float8), upcast_bytes(high, upcast.float8)]
    else:
        tiles = [
            elementwise(code, ptx.UPCAST_CONSTRAINTS, ptx.UPCAST_PACK, jnp.float16, x)
            for code in (upcast.low, upcast.high)
        ]
    return tiles


def scores(q, k, rule, added=()):
    more = None
    for x, y in zip(q[1:], k[1:], strict=True):
        product = dot(x, y.T)
        more = product if more is None else more + product
    return attention_scores(
        q[0], k[0], rule.scale, rule.softcap, rule.scale_first, more, added=added
    )


def add_pv(acc, p, v):
    return [x + dot(p, y) for x, y in zip(acc, v, strict=True)]


def normalise(acc, m_i, l_i, sink, v_scale_ref, in_base_2):
    if sink is not None:
        alpha, m_i, l_i = add_sink(sink, m_i, l_i, in_base_2)
        acc = [x * alpha[:, None] for x in acc]
    l_safe, lse = row_statistics(m_i, l_i, in_base_2)
    out = [x / l_safe[:, None] for x in acc]
    if v_scale_ref is not None:
        v_scale = v_scale_ref[...]
        out = [x * v_scale for x in out]
    return out, lse


def store_out(ref, out, index, is_row, size, block_size):
    for half in range(len(out)):
        store_rows_at(ref, out[half], index, is_row, size, block_size, half, len(out))


def add_stored(out, ref, index, is_row, factor, size, block_size):
    stored = (
        load_rows_at(ref, index, is_row, size, block_size, half, len(out))
        for half in range(len(out))
    )
    return [x + y * factor[:, None] for x, y in zip(out, stored, strict=True)]


def upcast_bytes(x, float8):
    if float8:
        magnitude = x.astype(jnp.int16) & 0x7F
        bits = (x.astype(jnp.int16) & 0x80) << 8 | magnitude << 7
        y = lax.bitcast_convert_type(bits, jnp.float16) * jnp.float16(256)
        x = jnp.where(magnitude == 0x7F, jnp.float16(float("nan")), y)
    return x.astype(jnp.float16)


def to_float16(tiles):
    factor = jnp.ones(tiles[0].shape[0], jnp.float32)
    if tiles[0].dtype == jnp.bfloat16:
        tiles = [x.astype(jnp.float32) for x in tiles]
        largest = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(x), 1) for x in tiles))
        exponent = lax.bitcast_convert_type(largest, jnp.int32) >> 23
        exponent = jnp.minimum(jnp.maximum(exponent, 14), 253)
        factor = lax.bitcast_convert_type((exponent - 13) << 23, jnp.float32)
        inverse = lax.bitcast_convert_type((267 - exponent) << 23, jnp.float32)[:, None]
        tiles = [x * inverse for x in tiles]
    return [x.astype(jnp.float16) for x in tiles], factor


def round_to_integer(x):
    """Round float32 below 2^22 to int32, ties to even; XLA folds away a subtraction."""
    bits = lax.bitcast_convert_type(x + ROUND_TO_INTEGER, jnp.int32)
    return bits - ROUND_TO_INTEGER_BITS


def quantize(x, scale, dtype, compiled):
    return round_to(
        divide(x.astype(jnp.float32), jnp.broadcast_to(scale, x.shape), compiled), dtype
    )


def round_to(x, dtype):
    if dtype == jnp.int8:
        x = jnp.where(x == x, x, 0.0)
        x = jnp.minimum(jnp.maximum(x, -127.0), 127.0)
        return round_to_integer(x).astype(jnp.int8)
    sign = (x < 0).astype(jnp.int32) << 7
    magnitude = jnp.minimum(jnp.abs(x), FLOAT8_MAX)
    bits = lax.bitcast_convert_type(magnitude, jnp.int32)
    # A normal number: round off 20 of 23 bits, then change the exponent's bias from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Below 2^-6: round to a multiple of 2^-9.
    tiny = round_to_integer(magnitude * 512.0)
    y = sign | jnp.where(magnitude < 0.015625, tiny, normal)
    return lax.bitcast_convert_type(jnp.where(x == x, y, 0x7F).astype(jnp.uint8), dtype)


def divide(x, y, compiled):
    """Return float32 x / y, rounded to nearest; Triton compiles "/" to a faster division."""
    if not compiled:
        return x / y
    return elementwise(ptx.DIVIDE, ptx.DIVIDE_CONSTRAINTS, 1, jnp.float32, x, y)


def elementwise(code, constraints, pack, dtype, *args):
    result = jax.ShapeDtypeStruct(args[0].shape, dtype)
    (out,) = plt.elementwise_inline_asm(
        code, args=args, constraints=constraints, pack=pack, result_shape_dtypes=[result]
    )
    return out
