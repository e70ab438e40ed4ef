"""The reference family: the operations in plain JAX, on any device, for any supported problem.

Each function takes and returns what the kernel of the same name does, and computes in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from pallas_attn.kernels.parts import result_before
from twin_attention.contract.operands import (
    AppendOperands,
    AttentionOperands,
    DecodeOperands,
    GradientCarry,
    PagedOperands,
    PartialOperands,
)
from twin_attention.contract.paged_spec import AppendSpec, DecodeSpec, PagedSpec
from twin_attention.contract.reference.cache import positions_of_new, quantize
from twin_attention.contract.reference.kinds import backward_of, forward_of, jvp_of
from twin_attention.contract.reference.merge import merge, merge_backward
from twin_attention.contract.reference.paged import paged_forward, ragged_forward
from twin_attention.contract.reference.partial import partial_backward, partial_forward
from twin_attention.contract.reference.rotary import rotate_new
from twin_attention.contract.spec import AttentionSpec, MergeSpec, PartialSpec
from twin_attention.targets.family import Backend


def flash_fwd(
    operands: AttentionOperands[Array], spec: AttentionSpec, backend: Backend
) -> tuple[Array, ...]:
    """Compute with O(Sq · Skv) memory."""
    forward = forward_of(spec)
    with jax.default_matmul_precision("highest"):
        out, lse, *of_rows = forward(operands, spec, jnp.float32)
    rest = [jnp.zeros_like(lse)] if spec.terms else []  # its backward needs none
    return out.astype(operands.q.dtype), lse, *rest, *of_rows


def flash_bwd(
    dout: Array,
    dlse: Array | None,
    operands: AttentionOperands[Array],
    out: Array,
    lse: Array,
    rest: Array | None,
    spec: AttentionSpec,
    backend: Backend,
) -> AttentionOperands[Array]:
    """Compute with O(Sq · Skv) memory."""
    backward = backward_of(spec)
    with jax.default_matmul_precision("highest"):
        gradients = backward(dout, dlse, operands, spec, jnp.float32)
    both = zip(gradients, operands, strict=True)
    return gradients._make(None if dx is None else dx.astype(x.dtype) for dx, x in both)


def flash_jvp(
    tangents: AttentionOperands[Array],
    operands: AttentionOperands[Array],
    out: Array,
    lse: Array,
    rest: Array | None,
    spec: AttentionSpec,
    backend: Backend,
) -> tuple[Array, Array]:
    """Compute the tangents of out and lse with O(Sq · Skv) memory; None is a tangent of 0."""
    with jax.default_matmul_precision("highest"):
        dout, dlse = jvp_of(spec)(tangents, operands, spec, jnp.float32)
    return dout.astype(out.dtype), dlse


def partial_fwd(
    operands: PartialOperands[Array],
    carry: Array | None,
    lse: Array | None,
    spec: PartialSpec,
    backend: Backend,
) -> tuple[Array, Array]:
    carry, lse = result_before(carry, lse, spec)
    with jax.default_matmul_precision("highest"):
        out, lse = partial_forward(operands, carry, lse, spec, jnp.float32)
    return (out.astype(operands.q.dtype) if spec.last else out), lse


def partial_bwd(
    dout: Array,
    dlse: Array | None,
    operands: PartialOperands[Array],
    out: Array,
    lse: Array,
    carry: GradientCarry[Array] | None,
    spec: PartialSpec,
    backend: Backend,
) -> tuple[GradientCarry[Array], Array, Array]:
    """Return a carry whose lse2 holds lse."""
    with jax.default_matmul_precision("highest"):
        if carry is None:
            products = dout.astype(jnp.float32) * out.astype(jnp.float32)
            delta = jnp.swapaxes(products.sum(-1), 1, 2)
            if dlse is not None:
                delta = delta - jnp.where(lse == -jnp.inf, 0, dlse)
            carry = GradientCarry(jnp.zeros(operands.q.shape, jnp.float32), lse, delta)
        dq, dk, dv = partial_backward(dout, carry.lse2, carry.delta, operands, spec, jnp.float32)
    return carry._replace(dq=carry.dq + dq), dk, dv


def partial_dq(
    like: Array, carry: GradientCarry[Array], spec: PartialSpec, backend: Backend
) -> Array:
    return carry.dq.astype(like.dtype)


def paged_decode(
    operands: DecodeOperands[Array], spec: DecodeSpec, backend: Backend
) -> tuple[Array, Array]:
    with jax.default_matmul_precision("highest"):
        out, lse = paged_forward(operands, spec, jnp.float32)
    return out.astype(operands.q.dtype), lse


def paged_attention(
    operands: PagedOperands[Array], spec: PagedSpec, backend: Backend
) -> tuple[Array, Array]:
    with jax.default_matmul_precision("highest"):
        out, lse = ragged_forward(operands, spec, jnp.float32)
    return out.astype(operands.q.dtype), lse


def append_kv(
    operands: AppendOperands[Array], spec: AppendSpec, backend: Backend
) -> tuple[Array, ...]:
    k_new, q = rotate_new(operands, spec, jnp.float32)
    pools = operands.k_pages, operands.v_pages
    if not spec.is_empty:
        slots = _slots(operands, spec)
        new = (k_new, operands.k_scale), (operands.v_new, operands.v_scale)
        pools = tuple(
            None if pool is None else _write(pool, x, slots, scale, spec.cache)
            for pool, (x, scale) in zip(pools, new, strict=True)
        )
    return pools if q is None else (*pools, q.astype(operands.k_new.dtype))


def _slots(operands, spec):
    page_size = spec.cache.page_size
    position, sequence, is_token = positions_of_new(operands, spec)
    column, slot = position // page_size, position % page_size
    page = operands.block_tables.at[sequence, column].get(mode="fill", fill_value=-1)
    exists = is_token & (position >= 0) & (page >= 0)
    return jnp.where(exists, page, spec.cache.num_pages), slot


def _write(pages, new, slots, scale, cache):
    if scale is not None:
        new = quantize(new, scale, cache, pages.dtype)
    return pages.at[slots].set(new.astype(pages.dtype), mode="drop")


def combine(outs: Array, lses: Array, spec: MergeSpec, backend: Backend) -> tuple[Array, Array]:
    out, lse = merge(outs, lses, jnp.float32)
    return out.astype(outs.dtype), lse


def combine_bwd(dout: Array, dlse: Array, outs: Array, lses: Array) -> tuple[Array, Array]:
    """Compute `combine`'s gradients, as the twin's `portable.combine_bwd`: for every family."""
    douts, dlses = merge_backward(dout, dlse, outs, lses, jnp.float32)
    return douts.astype(outs.dtype), dlses
