"""Run the backward with the same sequence of kernels in every family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_attn.kernels.library.mask import mask_of_keys, mask_of_queries
from pallas_attn.kernels.library.sequences import (
    count_sequence_tiles,
    first_tile,
    locate_tile,
    with_batch,
    without_batch,
)
from pallas_attn.kernels.library.softmax import LOG2E, probabilities
from pallas_attn.kernels.library.terms import Terms, terms_of
from pallas_attn.kernels.library.tiles import ROW_PADDING
from twin_attention.contract.operands import AttentionOperands
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import Backend


class Inputs(NamedTuple):
    """Operands of the backward kernels; lse2 and delta are those of the preprocess."""

    q: Array
    k: Array
    v: Array
    dout: Array
    lse2: Array
    delta: Array


class Sources(NamedTuple):
    """Operands from which lse2 and delta are computed; rest is what lse lacks under terms."""

    q: Array
    k: Array
    v: Array
    dout: Array
    out: Array
    lse: Array
    dlse: Array | None
    rest: Array | None = None


Launch = Callable[..., Any]  # from inputs, problem, backend and `Mask`


def _rows_of_tiles(cu_seqlens: Array, num_rows: int) -> tuple[Array, Array, Array]:
    """Return the axis' row of each row of lse2, whether there is one, and whether it is a token."""
    numbers = jnp.arange(cu_seqlens.shape[0], dtype=jnp.int32)
    tiles = count_sequence_tiles(num_rows, cu_seqlens.shape[0] - 1, ROW_PADDING)
    tile = jnp.arange(tiles, dtype=jnp.int32)[:, None]
    begins = first_tile(cu_seqlens, numbers, ROW_PADDING)
    sequence = _last_begun(begins, tile)
    _sequence, _first, start, end, first_dout, size_dout = locate_tile(
        cu_seqlens, cu_seqlens, tile, num_rows, num_rows, ROW_PADDING, lambda *_: sequence
    )
    row = start + jnp.arange(ROW_PADDING, dtype=jnp.int32)
    is_row, is_token = row < end, row < first_dout + size_dout
    row = jnp.minimum(row, num_rows - 1)
    return row.reshape(-1), is_row.reshape(-1), is_token.reshape(-1)


def _last_begun(begins: Array, place: Array) -> Array:
    """Return the index of the last entry that begins at or before a place, or 0 without one."""
    found = jnp.searchsorted(begins, place, side="right", method="scan_unrolled")
    return jnp.maximum(found.astype(jnp.int32) - 1, 0)


def make_flash_bwd(
    preprocess: Launch | None,
    launch_dq: Launch,
    launch_dkdv: Launch,
    launch_fused: Launch | None = None,
    terms_gradients: tuple[Callable[..., dict[str, Array]], ...] = (),
) -> Callable[..., AttentionOperands[Array]]:
    """Return the `flash_bwd` of a kernel family.

    Args:
        preprocess: computes lse2 and delta from `Sources`; None if launch_dq takes these, and
            returns dq, lse2 and delta.
        launch_fused: returns dq, dk, dv, lse2 and delta from `Sources`, for problems with its
            configuration; or None.
        terms_gradients: each computes the gradients of some terms, by name. launch_dq and
            launch_dkdv then take `terms`, and launch_dq may return a bias' gradient along with dq.
    """

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
        """Return the gradient of each operand that is not frozen, in its dtype."""
        q, k, v, dout, dlse, out, lse, rest = with_batch(
            spec, operands.q, operands.k, operands.v, dout, dlse, out, lse, rest
        )
        mask = mask_of_keys(operands, spec)
        sources = Sources(q, k, v, dout, out, lse, dlse, rest)
        gradients, rest2 = {}, None
        if launch_fused is not None and "flash_bwd_fused" in backend.configs(spec):
            dq, dk, dv, lse2, delta = launch_fused(sources, spec, backend, mask)
        else:
            terms: dict[str, Terms] = {}
            if preprocess is None:
                dq, lse2, delta = launch_dq(sources, spec, backend, mask)
                inputs = Inputs(q, k, v, dout, lse2, delta)
            else:
                lse2, delta, *of_terms = preprocess(sources, spec, backend, mask)
                if terms_gradients:
                    rest2 = of_terms[0] if of_terms else None
                    terms["terms"] = terms_of(operands, spec)._replace(rest2=rest2)
                inputs = Inputs(q, k, v, dout, lse2, delta)
                dq = launch_dq(inputs, spec, backend, mask, **terms)
            if isinstance(dq, tuple):
                dq, gradients["bias"] = dq
            dk, dv = launch_dkdv(inputs, spec, backend, mask_of_queries(operands, spec), **terms)
            for gradient in terms_gradients if spec.terms else ():
                gradients |= gradient(inputs, terms["terms"], mask, spec, backend)
        dq, dk, dv = without_batch(spec, dq, dk, dv)
        dsinks = None
        if operands.sinks is not None and "sinks" not in spec.frozen:
            cu_seqlens_q = mask.offsets.cu_seqlens_q
            dsinks = sinks_gradient(operands.sinks, lse2, delta, cu_seqlens_q, spec.seq_q, rest2)
        gradients |= {"q": dq, "k": dk, "v": dv, "sinks": dsinks}
        return operands._make(map(gradients.get, operands._fields))

    return flash_bwd


def sinks_gradient(
    sinks: Array,
    lse2: Array,
    delta: Array,
    cu_seqlens_q: Array | None = None,
    num_rows: int = 0,
    rest2: Array | None = None,
) -> Array:
    """Compute the gradient of the sinks [Hq]; packed lse2 and delta have rows of no query."""
    exists = cu_seqlens_q is None or _rows_of_tiles(cu_seqlens_q, num_rows)[1]
    of_heads = sinks[:, None]
    if rest2 is None:
        p = jnp.exp2(of_heads * LOG2E - lse2)
    else:
        p = probabilities(of_heads, lse2, rest2, LOG2E)
    return -jnp.sum(jnp.where(exists, p * delta, 0.0), (0, 2))
