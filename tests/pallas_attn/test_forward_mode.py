"""Forward mode: `jax.jvp`, `jax.linearize` and what is built from them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn import flash_attention


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
        pairs = zip(pullback((c[0, i], dlse[i])), dx[:3, i], strict=True)
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
