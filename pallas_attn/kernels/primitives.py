"""In-kernel building blocks, named as in the Triton twin.

Scores live in the exponent's base-2 domain: ``exp(x) = exp2(x * log2(e))``, so that one hardware
instruction gives p. `exp2_scale` takes a score there; it is ``scale * log2(e)`` when the scale is
positive and no softcap stands between (the product folds into the exponent's subtraction), else
``log2(e)`` after the score was scaled by itself.

Shapes are static in JAX, so what the twin takes as a compile-time flag is here an argument that
may be None, and loops over no tile at all are not traced.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


def visible_tiles(start, size, size_other, before, after, block, block_other):
    """Which tiles of the other axis the rows start .. start + block see.

    Row i stands at position ``p = i + size_other - size`` and sees ``p - before .. p + after``
    (None is unlimited). Queries see keys with (before, after) = (left, right), keys see queries
    with (right, left).

    Returns (begin, full_begin, full_end, end): tiles from `begin` to `end` have something to
    see, and those from `full_begin` to `full_end` need no mask. `end` alone is not a multiple of
    block_other.
    """
    first = start + size_other - size
    last = jnp.minimum(start + block, size) - 1 + size_other - size
    begin = 0
    full_begin = 0
    end = size_other
    full_end = size_other // block_other * block_other
    if before is not None:
        begin = lax.div(jnp.maximum(first - before, 0), block_other) * block_other
        full_begin = tiles(jnp.maximum(last - before, 0), block_other) * block_other
    if after is not None:
        end = jnp.minimum(jnp.maximum(last + after + 1, 0), size_other)
        full_end = jnp.minimum(
            full_end, lax.div(jnp.maximum(first + after + 1, 0), block_other) * block_other
        )
    return begin, full_begin, full_end, end


def phase_range(phase, begin, full_begin, full_end, end):
    """Tiles of one phase: 0, masked ones before the full tiles; 1, full tiles; 2, masked ones after."""
    if phase == 0:
        return begin, jnp.minimum(full_begin, end)
    if phase == 1:
        return full_begin, full_end
    if isinstance(full_begin, int) and isinstance(full_end, int):
        return max(full_begin, full_end), end
    return jnp.maximum(full_begin, full_end), end


def for_each_tile(lo, hi, block, body, carry):
    """``carry = body(start, carry)`` for start in range(lo, hi, block); lo is a multiple of block."""

    def step(index, carry):
        return body(lax.convert_element_type(index, jnp.int32) * block, carry)

    if isinstance(lo, int) and isinstance(hi, int) and lo >= hi:
        return carry
    return lax.fori_loop(tiles(lo, block), tiles(hi, block), step, carry)


def tiles(size, block):
    """How many tiles of `block` rows hold `size` >= 0 rows, the last one perhaps in part."""
    if isinstance(size, int):
        return pl.cdiv(size, block)
    return lax.div(size + (block - 1), block)


def load_tile(ref, start, num_rows, block_rows, size, block_size, mask_rows):
    """Rows start .. start + block_rows of a [num_rows, size] matrix, zero-padded to block_size columns.

    mask_rows: rows past `num_rows` give 0.
    """
    rows = arange(block_rows)[:, None]
    cols = arange(block_size)[None, :]
    tile = ref.at[pl.ds(start, block_rows), :]
    if mask_rows:
        return plt.load(tile, mask=(rows < num_rows - start) & (cols < size), other=0.0)
    if block_size != size:
        shape = (block_rows, block_size)
        return plt.load(tile, mask=jnp.broadcast_to(cols < size, shape), other=0.0)
    return plt.load(tile)


def store_tile(ref, x, start, num_rows, block_rows, size, block_size):
    """The inverse of `load_tile`; rows past `num_rows` and columns past `size` are not written."""
    rows = arange(block_rows)[:, None]
    cols = arange(block_size)[None, :]
    tile = ref.at[pl.ds(start, block_rows), :]
    plt.store(tile, x.astype(ref.dtype), mask=(rows < num_rows - start) & (cols < size))


def load_rows(ref, start, num_rows, block_rows, other):
    """Elements start .. start + block_rows of a vector of `num_rows`; `other` past its end."""
    rows = start + arange(block_rows)
    return plt.load(ref.at[pl.ds(start, block_rows)], mask=rows < num_rows, other=other)


def store_rows(ref, x, start, num_rows, block_rows):
    """The inverse of `load_rows`."""
    rows = start + arange(block_rows)
    plt.store(ref.at[pl.ds(start, block_rows)], x, mask=rows < num_rows)


def attention_scores(a, b, scale, softcap, scale_first):
    """a · bᵀ in float32, scaled where the exponent cannot do it (scale_first), then capped."""
    s = dot(a, b.T)
    if scale_first:
        s = s * scale
    if softcap is not None:
        s = softcap * tanh(s / softcap)
    return s


def softcap_derivative(s, softcap):
    """d capped / d score, from the capped score: ``1 - tanh²``."""
    t = s / softcap
    return 1.0 - t * t


def tanh(x):
    """Hyperbolic tangent to a few float32 ulps; by series near 0, where ``1 - exp`` cancels."""
    e = jnp.exp2(jnp.abs(x) * (-2.0 * LOG2E))
    ratio = (1.0 - e) / (1.0 + e)
    x2 = x * x
    series = x * (1.0 + x2 * (-1.0 / 3.0 + x2 * (2.0 / 15.0 - x2 * (17.0 / 315.0))))
    return jnp.where(jnp.abs(x) < 0.15, series, jnp.where(x < 0, -ratio, ratio))


def attention_mask(s, position, key, seq_kv, window_left, window_right):
    """Scores of the keys that a query at `position` does not see, or that do not exist, become -inf."""
    seen = key < seq_kv
    if window_left is not None:
        seen = seen & (key >= position - window_left)
    if window_right is not None:
        seen = seen & (key <= position + window_right)
    return jnp.where(seen, s, float("-inf"))


def online_softmax_update(s, m_i, l_i, acc, exp2_scale):
    """One step of the running softmax (Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1).

    Invariant: m_i is the row maximum so far (base 2), l_i the sum and acc the p·v product of
    ``exp2(s * exp2_scale - m_i)``. A row without a key so far keeps m_i = -inf and l_i = 0.
    Returns p of this tile and the three, rescaled to the new maximum (acc without this tile's p·v).
    """
    m_new = jnp.maximum(m_i, jnp.max(s, 1) * exp2_scale)
    m_safe = jnp.where(m_new == float("-inf"), 0.0, m_new)
    p = jnp.exp2(s * exp2_scale - m_safe[:, None])
    alpha = jnp.exp2(m_i - m_safe)
    l_i = l_i * alpha + jnp.sum(p, 1)
    acc = acc * alpha[:, None]
    return p, m_new, l_i, acc


def load_lse(ref, start, num_rows, block_rows):
    """Row log-sum-exps in base 2; +inf where a row saw no key or does not exist, so that p is 0."""
    lse = load_rows(ref, start, num_rows, block_rows, float("inf"))
    return jnp.where(lse == float("-inf"), float("inf"), lse) * LOG2E


def dot(a, b):
    """a · b accumulated in float32; float32 operands multiply in IEEE precision."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def arange(size):
    """0 .. size - 1 as int32, whatever jax_enable_x64 says."""
    return jnp.arange(size, dtype=jnp.int32)
