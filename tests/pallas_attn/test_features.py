import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import flash_attention
from tests.features import CASES, MAPPED, SIZES, operands_of
from twin_attention.interop.parity.cases import FlashCase

by_both = pytest.mark.parametrize("implementation", ["reference", "triton"])
ROW_MAX = FlashCase("row maxima", **SIZES, causal=True, row_max=True)


def arrays_of(case):
    return {name: jnp.asarray(x.numpy()) for name, x in operands_of(case).items()}


def attend(case, operands, **options):
    return flash_attention(**operands, **case.options | options)


@pytest.mark.parametrize("name", ["segments", "tree", "ranges", "terms", "dropout"])
def test_vmap_of_the_gradients(name):
    """Map over q and one more operand; a bias, depths and sinks are shared."""
    case, operands = CASES[name], arrays_of(CASES[name])
    x, axis = operands[MAPPED[name]], None if name == "dropout" else 0
    if name in ("segments", "tree", "ranges"):
        operands["sinks"] = jnp.array([0.5, -0.5])
    qs = jnp.stack([operands["q"], 2 * operands["q"]])
    several = x if axis is None else jnp.stack([x, x[..., ::-1]])

    def gradients(implementation):
        def loss(q, x):
            given = operands | {"q": q, MAPPED[name]: x}
            return (attend(case, given, implementation=implementation) ** 2).sum()

        return jax.grad(loss, (0, 1) if x.dtype == jnp.float32 else (0,))

    got = jax.jit(jax.vmap(gradients("triton"), (0, axis)))(qs, several)
    one_by_one = jax.jit(gradients("reference"))
    want = [one_by_one(qs[i], several if axis is None else several[i]) for i in (0, 1)]
    for a, b in zip(got, zip(*want, strict=True), strict=True):
        np.testing.assert_allclose(a, jnp.stack(b), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["segments", "tree", "ranges", "dropout"])
def test_integers_have_no_tangents(name):
    case, operands = CASES[name], arrays_of(CASES[name])
    out, pull = jax.vjp(jax.jit(lambda operands: attend(case, operands)), operands)
    (gradients,) = pull(out)
    for x, gradient in gradients.items():
        if operands[x].dtype == jnp.int32:
            assert gradient.dtype == jax.dtypes.float0
        else:
            assert jnp.isfinite(gradient).all()


def test_another_seed_compiles_nothing():
    case, operands = CASES["dropout"], arrays_of(CASES["dropout"])
    seed = operands.pop("dropout_seed")
    compiled = jax.jit(lambda seed: attend(case, operands | {"dropout_seed": seed}))
    first, second = compiled(seed), compiled(seed + 1)
    assert compiled._cache_size() == 1
    assert not jnp.array_equal(first, second)
    assert jnp.array_equal(first, compiled(jax.lax.bitcast_convert_type(seed, jnp.uint32)))


@pytest.mark.parametrize("return_lse", [False, True])
@by_both
def test_row_maxima_have_no_gradient(implementation, return_lse):
    operands = arrays_of(ROW_MAX)
    options = {"causal": True, "implementation": implementation, "return_lse": return_lse}

    def loss(q, asked):
        results = flash_attention(**operands | {"q": q}, return_row_max=asked, **options)
        results = results if isinstance(results, tuple) else (results,)
        return sum(x.sum() for x in results)

    got, want = (jax.grad(loss)(operands["q"], asked) for asked in (True, False))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@by_both
def test_row_maxima_under_vmap(implementation):
    operands = arrays_of(ROW_MAX)
    qs = jnp.stack([operands["q"], 2 * operands["q"]])

    def results(q):
        return attend(ROW_MAX, operands | {"q": q}, implementation=implementation)

    for got, want in zip(jax.vmap(results)(qs), zip(*map(results, qs), strict=True), strict=True):
        np.testing.assert_allclose(got, jnp.stack(want), rtol=1e-5, atol=1e-5)
