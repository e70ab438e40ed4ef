"""Trees in `pallas_attn` under JAX's transformations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import flash_attention, flash_attention_varlen

ENDS = [11, 11, 11, 7, 6, 7, 7, 11, 9, 11, 11]
DEPTHS = [0, 1, 2, 3, 4, 4, 5, 3, 4, 4, 5]


@pytest.fixture
def operands():
    """q, k, v, ends of keys, and depths of queries and of keys."""
    random = np.random.default_rng(0)
    shapes = (2, 9, 2, 16), (2, 11, 2, 16), (2, 11, 2, 24)
    q, k, v = (jnp.asarray(random.standard_normal(shape, np.float32)) for shape in shapes)
    tree = (jnp.array([x, x[::-1]], jnp.int32) for x in (ENDS, DEPTHS[2:], DEPTHS))
    return q, k, v, *tree


def attend(q, k, v, *tree, **options):
    tree = dict(zip(("kv_ends", "q_depths", "kv_depths"), tree, strict=True))
    return flash_attention(q, k, v, causal=True, window_size=(3, None), **tree, **options)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_vmap_of_the_gradients(operands, implementation):
    """Ends are mapped, depths shared by all; sinks as well."""
    q, k, v, ends, *depths = operands
    qs, several = jnp.stack([q, 2 * q]), jnp.stack([ends, ends - 1])
    sinks = jnp.array([0.5, -0.5])

    def loss(q, ends, implementation="reference"):
        options = {"implementation": implementation, "sinks": sinks}
        return (attend(q, k, v, ends, *depths, **options) ** 2).sum()

    got = jax.jit(jax.vmap(jax.grad(partial(loss, implementation=implementation))))(qs, several)
    want = jnp.stack([jax.grad(loss)(*x) for x in zip(qs, several, strict=True)])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_packed_sequences_are_a_batch(operands):
    q, k, v, *tree = (x.reshape(-1, *x.shape[2:]) for x in operands)
    offsets = (jnp.array([0, n, 2 * n], jnp.int32) for n in (9, 11))
    tree = dict(zip(("kv_ends", "q_depths", "kv_depths"), tree, strict=True))
    options = {"causal": True, "window_size": (3, None), "implementation": "triton"}
    got = flash_attention_varlen(q, k, v, *offsets, **tree, **options)
    want = attend(*operands, implementation="reference")
    np.testing.assert_allclose(got, want.reshape(got.shape), rtol=1e-5, atol=1e-5)


def test_a_tree_has_no_tangents(operands):
    out, pull = jax.vjp(jax.jit(attend), *operands)
    *gradients, of_ends, of_queries, of_keys = pull(out)
    assert all(jnp.isfinite(x).all() for x in gradients)
    assert {x.dtype for x in (of_ends, of_queries, of_keys)} == {jax.dtypes.float0}


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
