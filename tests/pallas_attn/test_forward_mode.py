"""Forward mode: `jax.jvp`, `jax.linearize` and what is built from them."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from pallas_attn import flash_attention, flash_attention_varlen
from twin_attention.contract.operands import DIFFERENTIABLE, FlashOperands, VarlenOperands
from twin_attention.contract.reference.kinds import jvp_of
from twin_attention.contract.tolerances import compare_to_reference
from twin_attention.interop.parity.cases import FlashCase, VarlenCase
from twin_attention.interop.parity.inputs import make_inputs

PLAIN = FlashCase(
    "plain", batch=1, seq_q=24, seq_kv=40, heads_q=2, heads_kv=1, head_dim=16, dtype="float32",
)  # fmt: skip
TERMS = replace(PLAIN, bias="bhqk", relative=3, alibi="all", softcap=2.0, sinks=True)
PACKED = VarlenCase(
    "packed", heads_q=2, heads_kv=1, head_dim=16, dtype="float32", lengths=((9, 20), (0, 3), (7, 7)),
    causal=True, sinks=True,
)  # fmt: skip
CASES = {
    "float16": replace(PLAIN, dtype="float16", causal=True, sinks=True),
    "masks": replace(PLAIN, seq_q=40, window_size=(9, 4), segments="shuffled", head_dim_v=24),
    "ranges": replace(PLAIN, causal=True, ranges="any", seq_q=40),
    "terms": TERMS,
    "dropout": replace(TERMS, dropout_rate=0.4, dtype="bfloat16", segments="documents"),
    "packed": PACKED,
    "packed terms": replace(PACKED, relative=2, alibi="all", dropout_rate=0.4),
}
# Operands without a tangent.
MISSING = {"masks": ("q",), "ranges": ("k", "v"), "packed terms": ("q", "k", "v", "sinks")}


def tangents_of(inputs, missing=()):
    make = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(x.shape, generator=make, dtype=torch.float64).to(x.dtype)
        for name, x in inputs.items()
        if name in DIFFERENTIABLE and name not in missing
    }


def to_jax(tensors):
    return {
        name: jnp.asarray(x.float().numpy()).astype(str(x.dtype)[6:])
        if x.is_floating_point()
        else jnp.asarray(x.numpy())
        for name, x in tensors.items()
    }


def attend(case, implementation):
    function = flash_attention_varlen if isinstance(case, VarlenCase) else flash_attention
    return partial(function, **case.options, return_lse=True, implementation=implementation)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_tangents(name, implementation):
    case, kind = CASES[name], VarlenOperands if name.startswith("packed") else FlashOperands
    inputs = {n: x for n, x in make_inputs(case, "cpu").items() if n not in ("dout", "dlse")}
    steps = tangents_of(inputs, MISSING.get(name, ()))
    others = {n: x for n, x in to_jax(inputs).items() if n not in steps}
    moved = {n: x for n, x in to_jax(inputs).items() if n in steps}

    @jax.jit
    def jvp(moved, steps, others):
        f = attend(case, implementation)
        return jax.jvp(lambda moved: f(**moved, **others), (moved,), (steps,))[1]

    got = jvp(moved, to_jax(steps), others)
    operands = kind(**{n: inputs.get(n) for n in kind._fields})
    tangents = kind(*(None,) * len(kind._fields))._replace(**steps)
    ref, lp = (
        jvp_of(case.spec)(*(cast(x, dtype) for x in (tangents, operands)), case.spec, dtype)
        for dtype in (torch.float64, getattr(torch, case.dtype))
    )
    for x, want, naive in zip(got, ref, lp, strict=True):
        x = torch.from_numpy(np.array(x.astype(jnp.float32)))
        agreement = compare_to_reference(x, want, naive, case.dtype, "gradient")
        assert agreement.ok, agreement


def cast(operands, dtype):
    return operands._make(
        x.to(dtype) if x is not None and x.is_floating_point() else x for x in operands
    )


def ways():
    """From a function, stacked operands and their tangents to stacked tangents of results."""

    def jvp(f, x, dx):
        return jax.jvp(f, x, dx)[1]

    def linearize(f, x, dx):
        return jax.linearize(f, *x)[1](*dx)

    def jit(f, x, dx):
        return jax.jit(partial(jvp, jax.jit(f)))(x, dx)

    def checkpoint(f, x, dx):
        return jvp(jax.checkpoint(f), x, dx)

    def scan(f, x, dx):
        return jvp(lambda *x: jax.lax.scan(lambda _, x: (None, f(*x)), None, x)[1], x, dx)

    def vmap_of_linearize(f, x, dx):
        return jax.vmap(partial(linearize, f))(x, dx)

    def jvp_of_vmap(f, x, dx):
        return jvp(jax.vmap(f), x, dx)

    each = [jvp, linearize, jit, checkpoint]
    return [*map(one_after_another, each), scan, vmap_of_linearize, jvp_of_vmap]


def one_after_another(way):
    def run(f, x, dx):
        found = [way(f, [y[i] for y in x], [y[i] for y in dx]) for i in range(2)]
        return jax.tree.map(lambda *y: jnp.stack(y), *found)

    run.__name__ = way.__name__
    return run


@pytest.mark.parametrize("way", ways(), ids=lambda way: way.__name__)
def test_transformations(way):
    """As the gradients say: the tangents, times any numbers, are the operands' times gradients."""
    x, dx, c = (jax.random.normal(jax.random.key(i), (4, 2, 1, 9, 2, 16)) for i in range(3))
    dlse = c[1, ..., 0].swapaxes(-1, -2)

    def f(q, k, v):
        return flash_attention(q, k, v, causal=True, return_lse=True, return_row_max=True)

    douts, dlses, of_row_max = way(f, tuple(x[:3]), tuple(dx[:3]))
    assert not of_row_max.any()
    for i in range(2):
        _, pullback = jax.vjp(lambda *x: f(*x)[:2], *x[:3, i])
        pairs = zip(pullback((c[0, i], dlse[i])), dx[:, i], strict=True)
        want = sum(jnp.vdot(y, z) for y, z in pairs)
        got = jnp.vdot(douts[i], c[0, i]) + jnp.vdot(dlses[i], dlse[i])
        assert jnp.allclose(got, want, rtol=1e-4, atol=1e-4)


def test_jacfwd_and_an_operand_that_is_not_mapped():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2, 1, 16))

    def f(k):
        mapped = jax.vmap(lambda v: flash_attention(q, k, v, return_lse=True))(jnp.stack([v, -v]))
        return mapped[0].sum((0, -1)), mapped[1]

    for got, want in zip(jax.jacfwd(f)(k), jax.jacrev(f)(k), strict=True):
        assert jnp.allclose(got, want, rtol=1e-4, atol=1e-5)


def test_reverse_mode_keeps_no_more_than_its_backward_reads():
    x = jnp.ones((1, 8, 2, 16))
    sinks, bias = jnp.ones(2), jnp.ones((1, 1, 8, 8))

    def f(q, k, v, sinks):
        return flash_attention(q, k, v, sinks=sinks, bias=bias, return_row_max=True)[0]

    kept = [y.shape for y in jax.tree.leaves(jax.vjp(jax.jit(f), x, x, x, sinks)[1])]
    lse_and_rest = (1, 2, 8)
    assert sorted(kept) == sorted([x.shape] * 4 + [lse_and_rest] * 2 + [sinks.shape, bias.shape])
    linear = jax.make_jaxpr(jax.linearize(f, x, x, x, sinks)[1])(x, x, x, sinks)
    assert [e.primitive.name for e in linear.eqns] == ["attention_tangents"]


def test_an_empty_problem_and_integers():
    q, k = jnp.ones((1, 4, 2, 16)), jnp.ones((1, 0, 2, 16))
    sinks, ids = jnp.full(2, 1.5), jnp.ones((1, 4), jnp.int32)
    none = np.zeros((1, 4), jax.dtypes.float0)

    def f(q, sinks, ids):
        return flash_attention(
            q, k, k, sinks=sinks, q_segment_ids=ids, kv_segment_ids=ids[:, :0], return_lse=True
        )

    dout, dlse = jax.jvp(f, (q, sinks, ids), (q, sinks, none))[1]
    assert not dout.any()
    assert (dlse == 1.5).all()
    assert not jax.jvp(lambda ids: f(q, sinks, ids), (ids,), (none,))[1][1].any()
