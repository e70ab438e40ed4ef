from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from pallas_attn import flash_attention
from pallas_attn.kernels import reference
from twin_attention.contract.operands import FREEZABLE
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets import family

RANDOM = np.random.default_rng(0)
SHAPES = {"sinks": (2,), "bias": (2, 2, 9, 9), "relative_bias": (2, 5)}
QKV = [jnp.asarray(RANDOM.standard_normal((2, 9, 2, 16), np.float32)) for _ in "qkv"]
OTHERS = {x: jnp.asarray(RANDOM.standard_normal(SHAPES[x], np.float32)) for x in FREEZABLE}


def loss(operands, frozen, implementation="reference"):
    q, k, v = QKV[0] if "q" not in operands else operands["q"], *QKV[1:]
    terms = {x: operands[x] if x in operands else frozen[x] for x in FREEZABLE}
    out, _ = flash_attention(q, k, v, **terms, return_lse=True, implementation=implementation)
    return (out**2).sum()


def mapped(x, frozen):
    many = jax.vmap(jax.grad(loss), (0, None))({n: jnp.stack([y, y]) for n, y in x.items()}, frozen)
    return {n: y[0] for n, y in many.items()}


def in_a_loop(x, frozen):
    def looped(x, frozen):
        return jax.lax.scan(lambda sum, _: (sum + loss(x, frozen), None), 0.0, length=1)[0]

    return jax.grad(looped)(x, frozen)


WAYS = {
    "eager": jax.grad(loss), "jit inside": jax.grad(jax.jit(loss)), "jit": jax.jit(jax.grad(loss)),
    "checkpoint": jax.grad(jax.checkpoint(loss)), "vmap": mapped, "loop": in_a_loop,
}  # fmt: skip


@pytest.fixture(scope="module")
def want():
    return jax.jit(jax.grad(loss))({"q": QKV[0], **OTHERS}, {})


@pytest.mark.parametrize("way", WAYS)
def test_what_needs_no_gradient_is_frozen(monkeypatch, way, want):
    original, seen = reference.flash_bwd, []

    def spy(*args):
        gradients = original(*args)
        (spec,) = (x for x in args if isinstance(x, AttentionSpec))
        assert all(getattr(gradients, name) is None for name in spec.frozen)
        seen.append((spec.frozen, args[1]))
        return gradients

    monkeypatch.setattr(reference, "flash_bwd", spy)
    monkeypatch.setattr(family, "_function", family._function.__wrapped__)  # without its cache
    jax.clear_caches()
    for name in FREEZABLE:
        seen.clear()
        got = WAYS[way]({"q": QKV[0], name: OTHERS[name]}, OTHERS)
        rest = tuple(x for x in FREEZABLE if x != name)
        assert {x for x, _ in seen} == {rest}
        assert all(dlse is None for _, dlse in seen)
        for x in got:
            np.testing.assert_allclose(got[x], want[x], rtol=1e-4, atol=1e-5)


def results_of_kernels(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield {x.aval.shape for x in equation.outvars}
        for inner in jaxprs_in_params(equation.params):
            yield from results_of_kernels(inner)


@pytest.mark.parametrize("batch", [1, 2])  # of a bias that is shared, and of one that is not
def test_no_kernel_computes_it(batch):
    frozen = OTHERS | {"bias": OTHERS["bias"][:batch]}
    found = []
    for x in ({"q": QKV[0]}, {"q": QKV[0], **frozen}):
        program = jax.make_jaxpr(jax.grad(partial(loss, implementation="triton")))(x, frozen)
        found.append([*results_of_kernels(program.jaxpr)])
    few, every = found
    branches = sum(frozen["bias"].shape in shapes for shapes in every)  # of platforms
    assert branches
    assert not any(frozen["bias"].shape in shapes for shapes in few)
    assert len(every) - len(few) == branches * (2 if batch == 1 else 1)
