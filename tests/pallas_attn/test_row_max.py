"""Row maxima in `pallas_attn` under JAX's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import flash_attention


@pytest.fixture
def qkv():
    random = np.random.default_rng(0)
    shapes = (2, 9, 2, 16), (2, 11, 2, 16), (2, 11, 2, 24)
    return [jnp.asarray(random.standard_normal(shape, np.float32)) for shape in shapes]


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_it_has_no_gradient(qkv, implementation, return_lse):
    options = {"causal": True, "implementation": implementation, "return_lse": return_lse}

    def loss(q, asked):
        results = flash_attention(q, *qkv[1:], return_row_max=asked, **options)
        results = results if isinstance(results, tuple) else (results,)
        rows = results[-1].sum() if asked else 0.0
        return sum(x.sum() for x in results[: 1 + return_lse]) + rows

    got, want = (jax.grad(loss)(qkv[0], asked) for asked in (True, False))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_vmap(qkv, implementation):
    q, k, v = qkv
    qs = jnp.stack([q, 2 * q])

    def attend(q):
        return flash_attention(q, k, v, return_row_max=True, implementation=implementation)

    for got, want in zip(jax.vmap(attend)(qs), zip(*map(attend, qs), strict=True), strict=True):
        np.testing.assert_allclose(got, jnp.stack(want), rtol=1e-5, atol=1e-5)
