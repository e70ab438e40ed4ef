"""A refused derivative names the public function."""

import jax
import jax.numpy as jnp
import pytest

from pallas_attn import (
    block_sparse_attention,
    dilated_attention,
    flash_attention,
    flash_attention_varlen,
    merge_states,
)
from pallas_attn.derivatives import once

OFFSETS = jnp.array([0, 20, 64], jnp.int32)
MASK = jnp.ones((1, 1), bool)
OF = {
    "flash_attention": lambda x: flash_attention(x, x, x),
    "flash_attention_varlen": lambda x: flash_attention_varlen(x[0], x[0], x[0], OFFSETS, OFFSETS),
    "block_sparse_attention": lambda x: block_sparse_attention(x, x, x, MASK),
    "dilated_attention": lambda x: dilated_attention(x, x, x, [32, 64], [1, 4]),
    "merge_states": lambda x: merge_states(jnp.stack([x, x]), jnp.zeros((2, 1, 2, 64)))[0],
}
every_function = pytest.mark.parametrize("name", OF)
wrapped = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(0), (1, 64, 2, 16))


def forward_mode():
    def jvp(f, x):
        return jax.jvp(f, (x,), (x,))

    def jitted_jvp(f, x):
        return jax.jit(lambda x: jax.jvp(f, (x,), (x,))[1])(x)

    def jvp_of_vmap(f, x):
        return jvp(jax.vmap(f), jnp.stack([x, x]))

    def vmap_of_jvp(f, x):
        return jax.vmap(lambda x: jvp(f, x)[1])(jnp.stack([x, x]))

    def jvp_of_a_scan(f, x):
        return jvp(lambda x: jax.lax.scan(lambda _, x: (None, f(x)), None, x[None]), x)

    def jacfwd(f, x):
        return jax.jacfwd(f)(x)

    def linearize(f, x):
        return jax.linearize(f, x)[1](x)

    return jvp, jitted_jvp, jvp_of_vmap, vmap_of_jvp, jvp_of_a_scan, jacfwd, linearize


@wrapped
@pytest.mark.parametrize("differentiate", forward_mode(), ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", [name for name in OF if not name.startswith("flash")])
def test_forward_mode_is_refused(x, name, differentiate, wrap):
    message = f"{name}: forward mode is not supported; reverse mode, once, is. Use jax.vjp"
    with pytest.raises(NotImplementedError, match=f"^{message} or jax.grad."):
        differentiate(wrap(OF[name]), x)


def second_derivatives():
    def of_an_input(loss, x):
        return jax.grad(lambda x: jnp.sum(jax.grad(loss)(x)))(x)

    def of_the_output_gradient(loss, x):
        _, pullback = jax.vjp(loss, x)
        return jax.grad(lambda dloss: jnp.sum(pullback(dloss)[0]))(1.0)

    def of_forward_over_reverse(loss, x):
        return jax.jvp(jax.grad(loss), (x,), (x,))

    return of_an_input, of_the_output_gradient, of_forward_over_reverse


@wrapped
@pytest.mark.parametrize("differentiate", second_derivatives(), ids=lambda f: f.__name__)
@every_function
def test_second_derivatives_are_refused(x, name, differentiate, wrap):
    loss = wrap(lambda x: jnp.sum(OF[name](x)))
    message = "a second derivative is not supported; reverse mode, once, is. Compute it with"
    if name == "block_sparse_attention" and differentiate.__name__ == "of_forward_over_reverse":
        message = "forward mode is not supported"  # of the first derivative
    with pytest.raises(NotImplementedError, match=f"^{name}: {message}"):
        differentiate(loss, x)


@wrapped
@pytest.mark.parametrize("name", ["flash_attention", "flash_attention_varlen"])
def test_a_second_derivative_of_a_tangent_is_refused_if_it_counts(x, name, wrap):
    def tangent(x, stopped=False):
        out, dout = jax.jvp(OF[name], (x,), (jnp.sin(x),))
        return jnp.sum(out * (jax.lax.stop_gradient(dout) if stopped else dout))

    for twice in jax.grad(wrap(tangent)), lambda x: jax.jvp(wrap(tangent), (x,), (x,)):
        with pytest.raises(NotImplementedError, match=f"^{name}: a second derivative"):
            twice(x)
    dout = jax.jvp(OF[name], (x,), (jnp.sin(x),))[1]
    got = jax.grad(wrap(lambda x: tangent(x, stopped=True)))(x)
    assert jnp.allclose(got, jax.grad(lambda x: jnp.sum(OF[name](x) * dout))(x), atol=1e-5)


def test_what_needs_no_derivative_gets_none(x):
    """An operand without a tangent, and integers."""
    ids = jnp.zeros(3, jnp.int32)

    def f(x, y):
        kept, other, same_ids, nothing = once((x, y, ids, None), "f")
        assert nothing is None
        return jax.lax.stop_gradient(kept).sum() + other.sum() + same_ids.sum()

    assert (jax.grad(f, 1)(x, x) == 1).all()
    assert (jax.grad(f, 0)(x, x) == 0).all()
    lowered = jax.jit(jax.grad(lambda y: f(x, y))).lower(x).as_text()
    assert "once" not in lowered
    assert jax.jvp(lambda y: once(x, "f").sum() + y, (1.0,), (1.0,))[1] == 1


@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint, jax.vmap])
def test_slopes_have_no_gradient(x, around):
    def attend(x, slopes):
        return flash_attention(x, x, x, alibi_slopes=slopes, implementation="reference").sum()

    def loss(x, slopes):
        return around(attend)(x, slopes).sum()

    slopes = jnp.ones(2)
    if around is jax.vmap:
        x, slopes = x[None], slopes[None]
    jax.grad(loss)(x, slopes)
    with pytest.raises(NotImplementedError, match="alibi_slopes: expected constants"):
        jax.grad(loss, 1)(x, slopes)
