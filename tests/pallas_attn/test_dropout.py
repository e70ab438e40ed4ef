"""Dropout and bias in `pallas_attn` under JAX's transformations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import flash_attention


@pytest.fixture
def operands():
    """q, k, v, a bias and a seed."""
    random = np.random.default_rng(0)
    shapes = (2, 9, 2, 16), (2, 11, 2, 16), (2, 11, 2, 24), (1, 2, 9, 11)
    tensors = [jnp.asarray(random.standard_normal(shape, np.float32)) for shape in shapes]
    return *tensors, jnp.array([1, -2], jnp.int32)


def attend(q, k, v, bias, seed, **options):
    terms = {"bias": bias, "dropout_seed": seed, "dropout_rate": 0.3}
    return flash_attention(q, k, v, causal=True, **terms, **options)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_vmap_of_the_gradients(operands, implementation):
    """Each element drops the same; the bias is shared, and has a gradient in each."""
    q, k, v, bias, seed = operands
    qs = jnp.stack([q, 2 * q])

    def loss(q, bias, implementation="reference"):
        return (attend(q, k, v, bias, seed, implementation=implementation) ** 2).sum()

    gradients = jax.grad(partial(loss, implementation=implementation), (0, 1))
    got = jax.jit(jax.vmap(gradients, (0, None)))(qs, bias)
    want = [jnp.stack(x) for x in zip(*(jax.grad(loss, (0, 1))(q, bias) for q in qs), strict=True)]
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_another_seed_compiles_nothing(operands):
    *tensors, seed = operands
    compiled = jax.jit(attend)
    first, second = compiled(*tensors, seed), compiled(*tensors, seed + 1)
    assert compiled._cache_size() == 1
    assert not jnp.array_equal(first, second)
    assert jnp.array_equal(first, attend(*tensors, jax.lax.bitcast_convert_type(seed, jnp.uint32)))
