"""Terms of scores in `pallas_attn` under JAX's transformations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import flash_attention, flash_attention_varlen


@pytest.fixture
def operands():
    """q, k, v, a table of distances and slopes of each sequence."""
    random = np.random.default_rng(0)
    shapes = (2, 9, 2, 16), (2, 11, 2, 16), (2, 11, 2, 24), (2, 7)
    tensors = [jnp.asarray(random.standard_normal(shape, np.float32)) for shape in shapes]
    return *tensors, jnp.asarray(random.random((2, 2), np.float32))


def attend(q, k, v, table, slopes, **options):
    return flash_attention(q, k, v, relative_bias=table, alibi_slopes=slopes, **options)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_vmap_of_the_gradients(operands, implementation):
    q, k, v, table, slopes = operands
    qs, tables = jnp.stack([q, 2 * q]), jnp.stack([table, -table])

    def loss(q, table, implementation="reference"):
        return (attend(q, k, v, table, slopes, implementation=implementation) ** 2).sum()

    gradients = jax.grad(partial(loss, implementation=implementation), (0, 1))
    got = jax.jit(jax.vmap(gradients))(qs, tables)
    want = [jnp.stack(x) for x in zip(*map(jax.grad(loss, (0, 1)), qs, tables), strict=True)]
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_slopes_are_constants(operands, implementation):
    def loss(slopes):
        return attend(*operands[:4], slopes, implementation=implementation).sum()

    assert (jax.grad(loss)(operands[4]) == 0).all()


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_packed_sequences_are_a_batch(operands, implementation):
    *qkv, table, slopes = operands
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in qkv)
    offsets = [jnp.array([0, n, 2 * n], jnp.int32) for n in (9, 11)]

    def packed(q, table):
        terms = {"relative_bias": table, "alibi_slopes": slopes}
        out = flash_attention_varlen(q, k, v, *offsets, implementation=implementation, **terms)
        return (out**2).sum()

    def dense(q, table):
        return (attend(q, *qkv[1:], table, slopes, implementation="reference") ** 2).sum()

    got, want = jax.grad(packed, (0, 1))(q, table), jax.grad(dense, (0, 1))(qkv[0], table)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x.reshape(y.shape), y, rtol=1e-4, atol=1e-5)
