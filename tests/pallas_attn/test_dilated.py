import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import dilated_attention

PAIRS = [((8, 16, 32), (1, 2, 4)), ((16, 32), (1, 4)), ((16,), (1,)), ((32,), (4,))]
every_pair = pytest.mark.parametrize("pairs", PAIRS, ids=str)


@pytest.fixture
def operands():
    shapes = (2, 32, 6, 16), (2, 32, 3, 16), (2, 32, 3, 24)
    return [*map(jax.random.normal, jax.random.split(jax.random.key(0), 3), shapes)]


def loss(q, k, v, pairs):
    out, lse = dilated_attention(q, k, v, *pairs, causal=True, return_lse=True)
    return jnp.sum(out**2) + jnp.sum(jnp.maximum(lse, -9))


@every_pair
def test_vmap_of_grad_under_jit(operands, pairs):
    q, k, v = operands
    qs = jnp.stack([q, 2 * q])

    @jax.jit
    def gradient(q):
        return jax.grad(loss)(q, k, v, pairs)

    got = jax.jit(jax.vmap(gradient))(qs)
    np.testing.assert_allclose(got, jnp.stack([*map(gradient, qs)]), rtol=1e-4, atol=1e-5)
