"""Paged decode, cache writes and merges on checked operands, as JAX's transformations see them.

Each is a custom_jvp, whose only rule refuses a gradient, around a jitted function, which makes a
call outside `jit` compile once. Inside it, `run_on_platform` picks the platform's family. A merge
has a gradient, done as in `pallas_attn.flash_ops`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_attn.attention import Attention
from pallas_attn.derivatives import once, together
from pallas_attn.dispatch import Backends, Implementation, choose_backends, run_on_platform
from pallas_attn.kernels import reference
from pallas_attn.operands import device_of
from pallas_attn.switches import promoting
from twin_attention.contract.operands import AppendOperands, DecodeOperands, PagedOperands
from twin_attention.contract.paged_spec import AppendSpec, DecodeSpec, PagedSpec
from twin_attention.contract.spec import MergeSpec
from twin_attention.contract.validate.errors import no_gradient
from twin_attention.contract.validate.options import check_decode_options, check_paged_options
from twin_attention.contract.validate.paged import check_paged_attention, check_paged_decode


def attend(
    operands: DecodeOperands[jax.Array] | PagedOperands[jax.Array],
    spec: DecodeSpec,
    implementation: Implementation | None,
    return_lse: bool,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    backends = choose_backends(implementation, _name(spec), device_of(operands.q), spec)
    out, lse = _attend(operands, spec, backends)
    return (out, lse) if return_lse else out


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
@partial(jax.jit, static_argnums=(1, 2))
@promoting
def _attend(operands, spec, backends):
    q, sinks, heads = operands.q, operands.sinks, spec.heads_q
    rows, of_lse = (spec.batch, spec.tokens), (spec.batch, heads, *q.shape[1:-2])
    if isinstance(spec, PagedSpec):
        rows, of_lse = (spec.tokens,), (heads, spec.tokens)
    if spec.is_empty:
        out = jnp.zeros((*rows, heads, spec.head_dim_v), q.dtype)
        lse = jnp.float32(-jnp.inf) if sinks is None else sinks[:, None]
        lse = jnp.broadcast_to(lse, (*rows[:-1], heads, spec.tokens))
    else:
        operands = operands._replace(q=q.reshape(*rows, heads, spec.head_dim))
        out, lse = run_on_platform(backends, _name(spec), spec, operands)
    return out.reshape(*q.shape[:-1], spec.head_dim_v), lse.reshape(of_lse)


def _name(spec: DecodeSpec) -> str:
    return "paged_attention" if isinstance(spec, PagedSpec) else "paged_decode"


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
@partial(jax.jit, static_argnums=(1, 2))
@promoting
def append(
    operands: AppendOperands[jax.Array], spec: AppendSpec, backends: Backends
) -> tuple[jax.Array, ...]:
    """Return the pools, in their own memory if XLA may write there, and rotated queries, if any."""
    k_new, v_new, q = operands.k_new, operands.v_new, operands.q
    if k_new.ndim == 3 and not spec.packed:
        new = {"k_new": k_new, "v_new": v_new, "q": q}
        operands = operands._replace(**jax.tree.map(lambda x: x[:, None], new))
    if spec.is_empty:
        found = reference.append_kv(operands, spec, backends.elsewhere)
    else:
        found = run_on_platform(backends, "append_kv", spec, operands)
    return found if q is None else (*found[:2], found[2].reshape(q.shape))


def merge(
    outs: jax.Array, lses: jax.Array, spec: MergeSpec, backends: Backends
) -> tuple[jax.Array, jax.Array]:
    """Merge results over disjoint sets of keys; differentiable once, in reverse."""
    states = once((outs, lses), "merge_states")
    return once(_merge(*states, spec, backends), "merge_states")


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _merge(outs, lses, spec, backends):
    return _merge_forward(outs, lses, spec, backends)


@partial(jax.jit, static_argnums=(2, 3))
@promoting
def _merge_forward(outs, lses, spec, backends):
    if spec.is_empty:
        out = jnp.zeros(outs.shape[1:], outs.dtype)
        return out, jnp.full(lses.shape[1:], -jnp.inf, jnp.float32)
    states = _with_tokens(outs, lses, spec)
    out, lse = run_on_platform(backends, "combine", spec, *states)
    return together(out.reshape(outs.shape[1:]), lse.reshape(lses.shape[1:]))


@partial(jax.jit, static_argnums=(4,))
@promoting
def _merge_backward(dout, dlse, outs, lses, spec):
    batch, tokens, heads = spec.batch, spec.tokens, spec.heads
    douts, dlses = reference.combine_bwd(
        dout.reshape(batch, tokens, heads, spec.head_dim_v),
        dlse.reshape(batch, heads, tokens),
        *_with_tokens(outs, lses, spec),
    )
    return douts.reshape(outs.shape), dlses.reshape(lses.shape)


def _with_tokens(outs, lses, spec):
    """Return states as [N, B, S, H, Dv] and [N, B, H, S]."""
    states, batch, tokens, heads = spec.num_states, spec.batch, spec.tokens, spec.heads
    return (
        outs.reshape(states, batch, tokens, heads, spec.head_dim_v),
        lses.reshape(states, batch, heads, tokens),
    )


def _merge_fwd(outs, lses, spec, backends):
    return _merge_forward(outs, lses, spec, backends), (outs, lses)


def _merge_bwd(spec, backends, states, gradients):
    return _merge_backward(*gradients, *states, spec)


_attend.defjvp(lambda spec, *_: no_gradient(_name(spec)))
append.defjvp(lambda *_: no_gradient("append_kv"))
_merge.defvjp(_merge_fwd, _merge_bwd)

PAGED_DECODE = Attention(DecodeOperands, check_decode_options, check_paged_decode, attend)
PAGED_ATTENTION = Attention(PagedOperands, check_paged_options, check_paged_attention, attend)
