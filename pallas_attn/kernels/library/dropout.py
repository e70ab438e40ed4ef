"""Dropout: the weights that multiply probabilities, from a counter-based generator."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.library.tiles import arange
from twin_attention.contract.dropout import MULTIPLIERS, ROUNDS, WEYL


def kept_pairs(terms, rule, rows, others, of_keys=False, any_start=False):
    if rule is None:
        return 1
    query, key = arange(rows.rows.shape[0]), arange(others.rows.shape[0])
    start_q, start_kv = rows.start - rows.first, others.start
    if of_keys:
        query, key, start_q, start_kv = key, query, start_kv, start_q
    first_q, first_kv = start_q >> 4 << 3, start_kv >> 5 << 3
    if any_start or key.shape[0] % 32 != 0:
        key, first_kv = key + start_kv, 0
    if of_keys:
        query, key = query[None, :], key[:, None]
    else:
        query, key = query[:, None], key[None, :]
    element, head = rows.element, others.head
    if terms.seed.shape[0] == 4:
        element, head = (
            element + terms.seed[2].astype(jnp.int32),
            head + terms.seed[3].astype(jnp.int32),
        )
    counters = (
        element,
        head,
        first_q + (query >> 4 << 3) + (query & 7),
        first_kv + (key >> 5 << 3) + (key & 7),
    )
    w0, w1, w2, w3 = philox(
        tuple(lax.convert_element_type(x, jnp.uint32) for x in counters),
        tuple(lax.bitcast_convert_type(terms.seed[i], jnp.uint32) for i in range(2)),
    )
    lower = jnp.where((key & 8) == 0, w0, w1)
    upper = jnp.where((key & 8) == 0, w2, w3)
    bits = jnp.where((query & 8) == 0, lower, upper)
    # Only the upper half matters to the comparison below.
    bits = jnp.where((key & 16) == 0, bits << 16, bits)
    kept = bits >= jnp.uint32(rule.threshold << 16)
    scale = jnp.full(kept.shape, rule.scale, jnp.float32)
    return jnp.where(kept, scale, 0.0)


def philox(counter, key):
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(ROUNDS):
        high0, low0 = _product(c0, MULTIPLIERS[0])
        high1, low1 = _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + jnp.uint32(WEYL[0]), k1 + jnp.uint32(WEYL[1])
    return c0, c1, c2, c3


def _product(x, multiplier):
    """Return the upper and lower 32 bits, with 64-bit integers even if JAX has them disabled."""
    with jax.enable_x64(True):
        product = lax.convert_element_type(x, jnp.uint64) * jnp.uint64(multiplier)
        upper = lax.convert_element_type(product >> jnp.uint64(32), jnp.uint32)
        return upper, lax.convert_element_type(product, jnp.uint32)
