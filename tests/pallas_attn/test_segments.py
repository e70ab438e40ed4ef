"""Segment ids in `pallas_attn.flash_attention` under JAX's transformations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import flash_attention


@pytest.fixture
def operands():
    """q, k, v and the ids of queries and of keys."""
    random = np.random.default_rng(0)
    shapes = (2, 9, 2, 16), (2, 11, 2, 16), (2, 11, 2, 24)
    q, k, v = (jnp.asarray(random.standard_normal(shape, np.float32)) for shape in shapes)
    ids = (jnp.asarray(random.integers(-1, 3, x.shape[:2], np.int32)) for x in (q, k))
    return q, k, v, *ids


def attend(q, k, v, q_ids, kv_ids, **options):
    return flash_attention(q, k, v, q_segment_ids=q_ids, kv_segment_ids=kv_ids, **options)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_vmap_of_the_gradients(operands, implementation):
    q, k, v, q_ids, kv_ids = operands
    qs, ids = jnp.stack([q, 2 * q]), jnp.stack([kv_ids, kv_ids[:, ::-1]])
    sinks = jnp.array([0.5, -0.5])

    def loss(q, kv_ids, implementation="reference"):
        options = {"implementation": implementation, "sinks": sinks}
        return (attend(q, k, v, q_ids, kv_ids, **options) ** 2).sum()

    got = jax.jit(jax.vmap(jax.grad(partial(loss, implementation=implementation))))(qs, ids)
    want = jnp.stack([jax.grad(loss)(*x) for x in zip(qs, ids, strict=True)])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_ids_have_no_tangents(operands):
    out, pull = jax.vjp(jax.jit(attend), *operands)
    *gradients, of_queries, of_keys = pull(out)
    assert all(jnp.isfinite(x).all() for x in gradients)
    assert of_queries.dtype == of_keys.dtype == jax.dtypes.float0


def test_with_64_bit_types_enabled(operands):
    def gradients(implementation):
        attend_32 = jax.jit(partial(attend, implementation=implementation))
        out, pull = jax.vjp(attend_32, *operands)
        return out, *pull(out)[:3]

    want = gradients("reference")
    with jax.enable_x64(True):
        got = gradients("triton")
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
