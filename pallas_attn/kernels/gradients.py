"""Run the backward: the same sequence of kernels in every family."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_attn.fusions import fusion
from pallas_attn.kernels.library.mask import Mask, mask_of_keys, mask_of_queries
from pallas_attn.kernels.library.sequences import (
    count_sequence_tiles,
    first_tile,
    locate_tile,
    with_batch,
    without_batch,
)
from pallas_attn.kernels.library.softmax import LOG2E, lse_in_base_2
from pallas_attn.kernels.library.terms import terms_of
from pallas_attn.kernels.library.tiles import ROW_PADDING
from twin_attention.contract.operands import AttentionOperands
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import Backend


class Inputs(NamedTuple):
    """Operands of a backward's kernels.

    Attributes:
        q, k, v: inputs of the forward.
        dout: the gradient of the output, [B, Sq, Hq, Dv].
        lse2, delta: [B, Hq, Sq rounded up to ROW_PADDING] float32, see `prepare_rows`.
    """

    q: Array
    k: Array
    v: Array
    dout: Array
    lse2: Array
    delta: Array


class Sources(NamedTuple):
    """Operands of a kernel of dq that computes lse2 and delta itself.

    Attributes:
        q, k, v, dout: as in `Inputs`.
        out, lse: outputs of the forward.
        dlse: the gradient of lse, or None for zero.
    """

    q: Array
    k: Array
    v: Array
    dout: Array
    out: Array
    lse: Array
    dlse: Array | None


class SumsOrder(NamedTuple):
    """Describe in which order memory has the float32 sums [B, H, rows, columns] of a gradient.

    A family adds products to sums in the order in which registers hold them. Its axes behind B and
    H are tiles of rows, blocks of 8 columns, and those of `block`.

    Attributes:
        block: sizes of the last axes.
        rows, columns: the axes that count rows, and the axes that count columns, the slowest first.
    """

    block: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def tile(self) -> int:
        """Return the rows of a tile."""
        return math.prod(self.block[axis - 2] for axis in self.rows[1:])


Launch = Callable[..., Any]  # from inputs, problem, backend and `Mask`


@fusion
def prepare_rows(
    dout: Array,
    dlse: Array | None,
    out: Array,
    lse: Array,
    spec: AttentionSpec,
    backend: Backend,
    mask: Mask,
) -> tuple[Array, Array]:
    """Compute lse2 and delta of every row, [B, Hq, Sq rounded up to ROW_PADDING] float32.

    XLA makes one kernel of it. lse2 is lse in base 2, or +inf where a row saw no key or does not
    exist, so that ``exp2(s - lse2)`` is 0 there; dlse counts as 0 where a row saw no key. Packed
    sequences: `count_sequence_tiles` of ROW_PADDING rows, so that each sequence begins a tile. dout
    counts as 0 in padding.
    """
    products = dout.astype(jnp.float32) * out.astype(jnp.float32)
    delta = jnp.swapaxes(jnp.sum(products, 3), 1, 2)
    lse2 = lse_in_base_2(lse)
    if dlse is not None:
        dlse = jnp.where(lse == float("-inf"), 0.0, dlse)
    cu_seqlens_q = mask.offsets.cu_seqlens_q
    if cu_seqlens_q is not None:
        row, is_row, is_token = _rows_of_tiles(cu_seqlens_q, spec.seq_q)
        delta = jnp.where(is_token, delta[..., row], 0.0)
        if dlse is not None:
            delta = delta - jnp.where(is_row, dlse[..., row], 0.0)
        return jnp.where(is_row, lse2[..., row], float("inf")), delta
    if dlse is not None:
        delta = delta - dlse
    padding = ((0, 0), (0, 0), (0, -lse.shape[2] % ROW_PADDING))
    return (
        jnp.pad(lse2, padding, constant_values=float("inf")),
        jnp.pad(delta, padding),
    )


def _rows_of_tiles(cu_seqlens: Array, num_rows: int) -> tuple[Array, Array, Array]:
    """Return which row of the axis each row of lse2 and delta is, where sequences begin tiles.

    Returns:
        The row of each; whether there is one; and whether that is no padding.
    """
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


def _rows_in_tiles(cu_seqlens: Array, num_rows: int) -> Array:
    """Return the row of lse2 and delta that each row of the axis is."""
    row = jnp.arange(num_rows, dtype=jnp.int32)
    sequence = _last_begun(cu_seqlens, row)
    first = jnp.where(sequence > 0, cu_seqlens[sequence], 0)
    return first_tile(first, sequence, ROW_PADDING) * ROW_PADDING + row - first


def _last_begun(begins: Array, place: Array) -> Array:
    """Return the last one that begins at or before a place, or the first of all."""
    found = jnp.searchsorted(begins, place, side="right", method="scan_unrolled")
    return jnp.maximum(found.astype(jnp.int32) - 1, 0)


def make_flash_bwd(
    preprocess: Callable[..., tuple[Array, Array]],
    launch_dq: Launch,
    launch_dkdv: Launch,
    launch_fused: Launch | None = None,
    dq_prepares_rows: bool = False,
    terms_gradients: tuple[Callable[..., dict[str, Array]], ...] = (),
) -> Callable[..., AttentionOperands[Array]]:
    """Return the `flash_bwd` of a family.

    Args:
        preprocess: compute lse2 and delta, as `prepare_rows` does.
        launch_dq: call the kernel of dq; returns dq.
        launch_dkdv: call the kernel of dk and dv; returns both.
        launch_fused: call the kernel of all three; returns dq, dk and dv. It runs where the problem
            has a configuration for it. None where the family has no such kernel.
        dq_prepares_rows: launch_dq takes `Sources` and returns dq, lse2 and delta; the preprocess
            is for the sums alone.
        terms_gradients: each computes the gradients of some terms by name; launch_dq and
            launch_dkdv then take `terms`, and launch_dq may return the gradient of a bias beside
            dq. None of a family without terms.
    """

    def flash_bwd(
        dout: Array,
        dlse: Array | None,
        operands: AttentionOperands[Array],
        out: Array,
        lse: Array,
        spec: AttentionSpec,
        backend: Backend,
    ) -> AttentionOperands[Array]:
        """Call the kernels of the backward. Packed sequences have no batch axis.

        Args:
            dout: [B, Sq, Hq, Dv].
            dlse: [B, Hq, Sq] float32, or None for zero.
            operands, out, lse: inputs and outputs of the forward.

        Returns:
            The gradient of each operand, in its dtype.
        """
        q, k, v, dout, dlse, out, lse = with_batch(
            spec, operands.q, operands.k, operands.v, dout, dlse, out, lse
        )
        mask = mask_of_keys(operands, spec)
        has_sums = launch_fused is not None and "flash_bwd_fused" in backend.configs(spec)
        dq, gradients = None, {}
        if has_sums or not dq_prepares_rows:
            lse2, delta = preprocess(dout, dlse, out, lse, spec, backend, mask)
        else:
            sources = Sources(q, k, v, dout, out, lse, dlse)
            dq, lse2, delta = launch_dq(sources, spec, backend, mask)
        inputs = Inputs(q, k, v, dout, lse2, delta)
        terms = {"terms": terms_of(operands, spec)} if terms_gradients else {}
        if has_sums:
            assert launch_fused is not None
            dq, dk, dv = launch_fused(inputs, spec, backend, mask)
        else:
            if dq is None:
                dq = launch_dq(inputs, spec, backend, mask, **terms)
            if isinstance(dq, tuple):
                dq, gradients["bias"] = dq
            dk, dv = launch_dkdv(inputs, spec, backend, mask_of_queries(operands, spec), **terms)
        dq, dk, dv = without_batch(spec, dq, dk, dv)
        dsinks = None
        if operands.sinks is not None:
            cu_seqlens_q = mask.offsets.cu_seqlens_q
            dsinks = sinks_gradient(operands.sinks, lse2, delta, cu_seqlens_q, spec.seq_q)
        gradients |= {"q": dq, "k": dk, "v": dv, "sinks": dsinks}
        for gradient in terms_gradients if spec.terms else ():
            gradients |= gradient(operands, inputs, mask, spec, backend)
        return operands._make(map(gradients.get, operands._fields))

    return flash_bwd


def gradient_sums(batch: int, heads: int, rows: int, columns: int) -> jax.ShapeDtypeStruct:
    """Return the type of a gradient's float32 sums, which lie in the family's `SumsOrder`.

    A kernel's index of an axis has 32 bits: rows and columns are two.
    """
    return jax.ShapeDtypeStruct((batch, heads, rows, columns), jnp.float32)


@fusion
def gradient_of_sums(
    sums: Array,
    order: SumsOrder,
    like: Array,
    scale: float = 1.0,
    cu_seqlens: Array | None = None,
) -> Array:
    """Return the gradient of an operand from its sums.

    Args:
        sums: [B, H, rows, columns]; packed sequences begin tiles of ROW_PADDING rows.
        order: in which they lie.
        like: the operand [B, S, H, D].
        scale: a factor of the sums.
        cu_seqlens: offsets of packed sequences.
    """
    batch, heads, padded_rows, columns = sums.shape
    tiles = padded_rows // order.tile, columns // 8
    blocks = sums.reshape(batch, heads, *tiles, *order.block)
    axes = (0, *(2 + x for x in order.rows), 1, *(2 + x for x in order.columns))
    ordered = blocks.transpose(axes).reshape(batch, padded_rows, heads, columns)
    _, rows, _, size = like.shape
    if cu_seqlens is not None:
        ordered = ordered[:, _rows_in_tiles(cu_seqlens, rows)]
    return (ordered[:, :rows, :, :size] * scale).astype(like.dtype)


@fusion
def sinks_gradient(
    sinks: Array, lse2: Array, delta: Array, cu_seqlens_q: Array | None = None, num_rows: int = 0
) -> Array:
    """Compute the gradient of the sinks [Hq] from lse2 and delta of all rows.

    Packed sequences have rows of lse2 and delta between them that are no query's.

    Args:
        sinks: [Hq] float32.
        lse2, delta: of `prepare_rows`.
        cu_seqlens_q: offsets of packed sequences.
        num_rows: of these.
    """
    exists = cu_seqlens_q is None or _rows_of_tiles(cu_seqlens_q, num_rows)[1]
    p = jnp.exp2(sinks[:, None] * LOG2E - lse2)
    return -jnp.sum(jnp.where(exists, p * delta, 0.0), (0, 2))
