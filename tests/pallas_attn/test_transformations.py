from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

from pallas_attn import (
    block_sparse_attention,
    dilated_attention,
    flash_attention,
    flash_attention_varlen,
    merge_states,
)
from pallas_attn.distributed import context_attention, context_plan
from tests.oracle import assert_within_budget
from twin_attention.contract.transfers import EXCHANGES
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.inputs import Tensors, make_inputs

CASE = FlashCase(
    "transformations", batch=1, seq_q=24, seq_kv=40, heads_q=4, heads_kv=2, head_dim=16,
    dtype="float16", causal=True, sinks=True,
)  # fmt: skip


@pytest.fixture
def attention(implementation):
    options = {**CASE.options, "return_lse": True, "implementation": implementation}
    return lambda q, k, v, sinks: flash_attention(q, k, v, sinks=sinks, **options)


@pytest.fixture(scope="module")
def problems() -> list[Tensors]:
    first, second = (make_inputs(replace(CASE, name=name), "cpu") for name in ("first", "second"))
    return [first, second | {"k": first["k"]}]


def to_jax(problem):
    return [jnp.asarray(x.numpy()) for x in problem.values()]


def stacked(problems):
    return [jnp.stack(xs) for xs in zip(*map(to_jax, problems), strict=True)]


def to_torch(x):
    return torch.from_numpy(np.array(x))


def assert_right(got, problem):
    assert_within_budget([*map(to_torch, got)], problem, CASE.spec)


def results_and_gradients(attention, *inputs):
    *operands, dout, dlse = inputs
    results, pullback = jax.vjp(attention, *operands)
    return *results, *pullback((dout, dlse))


def recomputed(attention):
    return jax.jit(jax.checkpoint(attention))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, recomputed], ids=["eager", "jit", "remat"])
def test_gradients(attention, problems, wrap):
    got = results_and_gradients(wrap(attention), *to_jax(problems[0]))
    assert_right(got, problems[0])


def test_gradients_of_the_output_alone(implementation, problems):
    problem = problems[0] | {"dlse": torch.zeros_like(problems[0]["dlse"])}
    q, k, v, sinks, dout, _ = to_jax(problem)
    attention = partial(flash_attention, **CASE.options, implementation=implementation)
    loss, gradients = jax.value_and_grad(
        lambda q, k, v, sinks: jnp.sum(attention(q, k, v, sinks=sinks) * dout), argnums=(0, 1, 2, 3)
    )(q, k, v, sinks)
    out, lse = attention(q, k, v, sinks=sinks, return_lse=True)
    assert loss == jnp.sum(out * dout)
    assert_right((out, lse, *gradients), problem)


def test_vmap_of_the_gradients(attention, problems):
    q, k, *others = stacked(problems)
    mapped = jax.vmap(partial(results_and_gradients, attention), in_axes=(0, None, 0, 0, 0, 0))
    got = jax.jit(mapped)(q, k[0], *others)
    for i, problem in enumerate(problems):
        assert_right([x[i] for x in got], problem)


def test_gradients_of_a_vmap(attention, problems):
    q, k, v, sinks, dout, dlse = stacked(problems)
    mapped = jax.jit(jax.vmap(attention, in_axes=(2, 0, 1, 1)))
    moved = jnp.moveaxis(q, 0, 2), k, jnp.moveaxis(v, 0, 1), sinks.T
    out, lse, dq, dk, dv, dsinks = results_and_gradients(mapped, *moved, dout, dlse)
    dq, dv = jnp.moveaxis(dq, 2, 0), jnp.moveaxis(dv, 1, 0)
    for i, problem in enumerate(problems):
        assert_right([x[i] for x in (out, lse, dq, dk, dv, dsinks.T)], problem)


def test_gradients_through_a_scan(attention, problems):
    def scanned(*operands):
        return jax.lax.scan(lambda _, each: (None, attention(*each)), None, operands)[1]

    got = jax.jit(partial(results_and_gradients, scanned))(*stacked(problems))
    for i, problem in enumerate(problems):
        assert_right([x[i] for x in got], problem)


def functions_of_several_results():
    """Functions of (x, mapped), whose lse does not depend on what is mapped."""
    ends, tiles = jnp.array([0, 9, 24], jnp.int32), jnp.ones((1, 1), bool)
    mesh = jax.make_mesh((1,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    options = {"implementation": "reference", "return_lse": True}

    def in_context(x, v, exchange):
        place = partial(context_attention, plan=context_plan(24, 1), axis_name="context")
        attend = jax.shard_map(
            partial(place, exchange=exchange, **options), mesh=mesh, check_vma=False,
            in_specs=(P(),) * 3, out_specs=(P(), P()),
        )  # fmt: skip
        return attend(x, x, v)

    return {
        "flash": lambda x, v: flash_attention(x, x, v, **options),
        "vmap": lambda x, v: jax.vmap(lambda v: flash_attention(x, x, v, **options))(
            jnp.stack([v, 2 * v])
        ),
        "row_max": lambda x, v: flash_attention(x, x, v, return_row_max=True, **options),
        "seed": lambda x, seed: flash_attention(
            x, x, x, dropout_rate=0.5, dropout_seed=seed.view(jnp.int32)[0, :2, 0, 0], **options
        ),
        "varlen": lambda x, v: flash_attention_varlen(x[0], x[0], v[0], ends, ends, **options),
        "block_sparse": lambda x, v: block_sparse_attention(x, x, v, tiles, **options),
        "dilated": lambda x, v: dilated_attention(x, x, v, [12, 24], [1, 2], **options),
        "merge": lambda x, v: merge_states(
            jnp.stack([v, v]), x.reshape(-1, 1, 2, 24)[:2], implementation="reference"
        ),
        **{f"context_{name}": partial(in_context, exchange=name) for name in EXCHANGES},
    }


@pytest.mark.parametrize("name", functions_of_several_results())
def test_gradients_of_an_lse_that_is_not_mapped(name):
    attend = functions_of_several_results()[name]
    x, *each = jax.random.normal(jax.random.key(0), (4, 1, 24, 2, 16))

    def loss(x, v):
        out, lse, *_ = attend(x, v)
        return jnp.sum(lse * jnp.cos(jnp.arange(24.0))) + jnp.sum(out)

    def mapped(x):
        return jax.vmap(loss, (None, 0))(x, jnp.stack(each)).sum()

    got, want = (jax.jit(jax.grad(f))(x) for f in (mapped, lambda x: sum(loss(x, v) for v in each)))
    assert jnp.allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("option", "of"),
    [
        ("scale", lambda x: x),
        ("softcap", lambda x: x),
        ("causal", lambda x: x > 0),
        ("window_size", lambda x: (x.astype(int), None)),
    ],
)
def test_a_traced_option_is_refused_as_static(problems, option, of):
    q, k, v, *_ = to_jax(problems[0])
    attend = jax.jit(lambda x: flash_attention(q, k, v, **{option: of(x)}))
    got = "got a traced value; options are static: pass it by static_argnames"
    with pytest.raises(TypeError, match=f"^{option}: expected .*{got}"):
        attend(0.5)
