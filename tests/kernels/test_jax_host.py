from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from pallas_attn.fusions import fusion, whole_fusions
from twin_attention.interop.kernels.jax_host import plan_of
from twin_attention.interop.kernels.plan import Value


class Card(NamedTuple):
    capability: int = 90
    num_sms: int = 132
    shared_memory: int = 2**17


class Options(NamedTuple):
    sizes: tuple
    name: str
    x: jax.Array


@fusion
def weigh(options, y, factor=1.0):
    return options.x * factor, jnp.sum(y)


def of(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def host(x, y, nothing):
    assert nothing is None
    zeros = jnp.zeros((2, 4), jnp.int32)
    weighed, total = jax.jit(lambda x, y: weigh(Options((3, 4), "a", x[None]), y, 0.5))(x, y)
    return {"weighed": weighed[0], "zeros": zeros}, total, y


def test_steps_and_results():
    found = plan_of(host, (of(4), of(2, 3, dtype="bfloat16"), None), Card())
    x, y = Value(0, (4,), "float32"), Value(1, (2, 3), "bfloat16")
    names = [step.name for step in found.steps]
    assert sorted(names) == ["full", "reshape", "reshape", "weigh"]
    steps = dict(zip(names, found.steps, strict=True))
    (filled,), total = steps["full"].results, steps["weigh"].results[1]
    assert (filled.shape, filled.dtype, steps["full"].args) == ((2, 4), "int32", (0,))
    options, weighed_y, factor = steps["weigh"].args
    assert options == Options((3, 4), "a", Value(options.x.number, (1, 4), "float32"))
    assert (weighed_y, factor) == (y, 0.5)
    results, got_total, got_y = found.results
    assert (results["zeros"], got_total, got_y) == (filled, total, y)
    assert found.steps[-1].results == (results["weighed"],) or names[-1] != "reshape"
    assert next(s for s in found.steps if s.name == "reshape").args == (x,)


@pytest.mark.parametrize(
    "function", [jnp.sin, jnp.transpose, lambda x: jnp.broadcast_to(x, (2, 4, 3))]
)
def test_what_torch_has_nothing_for_is_refused(function):
    with pytest.raises(NotImplementedError, match=r"expected kernels, .* got \w+ of JAX"):
        plan_of(function, (of(4, 3),), Card())


def test_a_fusion_is_as_it_was_elsewhere():
    x, y = jnp.arange(4.0), jnp.ones(3)

    def trace():
        return str(jax.make_jaxpr(lambda y: weigh(Options((), "a", x), y))(y))

    assert "fusion" not in trace()
    got = jax.jit(weigh)(Options((), 2.0, x), y)
    assert got[0].tolist() == x.tolist()
    assert got[1] == 3
    with whole_fusions():
        assert trace().count("fusion[") == 1
    assert "fusion" not in trace()
