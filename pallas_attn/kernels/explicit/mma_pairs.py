"""Pairs of query and key in the kernels of mma.sync: the verbs of `library.pairs`, with scalars."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.mma import product_scores
from pallas_attn.kernels.explicit.mma_scores import visible_scores
from pallas_attn.kernels.explicit.registers import iota
from pallas_attn.kernels.explicit.sequences import locate_tile
from pallas_attn.kernels.explicit.steps import step_start
from pallas_attn.kernels.library.schedule import longest_first
from pallas_attn.kernels.library.sequences import count_sequence_tiles, first_tile
from pallas_attn.kernels.library.tiles import ROW_PADDING, Visible, visible_tiles
from twin_attention.contract.spec import Window


class Rows(NamedTuple):
    """A program's tile as `library.pairs.rows.Rows`; a warpgroup has `size` rows from `part` on."""

    batch: Any
    head: Any
    start: Any
    end: Any
    first_other: Any
    size_other: Any
    diagonal: Any
    padded: Any
    block: int
    packed: bool
    warpgroup: Any
    warpgroups: int
    part: Any
    size: int


def own_queries(offsets, q_ref, seq_q, seq_kv, block, num_warps, together):
    index, tile, _ = _place(offsets, q_ref.shape[0] * q_ref.shape[2], seq_q, block, together)
    sequence, first, *rows = locate_tile(*offsets, tile, seq_q, seq_kv, block)
    padded = first_tile(first, sequence, ROW_PADDING) * ROW_PADDING - first
    return _rows(offsets, index, q_ref.shape[2], rows, padded, block, num_warps)


def own_keys(offsets, k_ref, seq_q, seq_kv, block, num_warps, together):
    num_heads = k_ref.shape[0] * k_ref.shape[2]
    index, tile, num_tiles = _place(offsets, num_heads, seq_kv, block, together)
    tile = num_tiles - 1 - tile
    sequence, _first, *rows = locate_tile(*reversed(offsets), tile, seq_kv, seq_q, block)
    padded = first_tile(rows[2], sequence, ROW_PADDING) * ROW_PADDING
    return _rows(offsets, index, k_ref.shape[2], rows, padded, block, num_warps)


def _place(offsets, num_heads, num_rows, block, together):
    num_tiles = count_sequence_tiles(num_rows, offsets.num_sequences, block)
    program = lax.axis_index("program")
    return *longest_first(program, num_tiles, num_heads, together(num_tiles)), num_tiles


def _rows(offsets, index, heads, located, padded, block, num_warps):
    start, end, first_other, size_other = located
    warpgroups = num_warps // 4
    warpgroup = lax.axis_index("warpgroup") if warpgroups > 1 else 0
    size = block // warpgroups
    return Rows(
        index // heads, index % heads, start, end, first_other, size_other, size_other - end,
        padded, block, offsets.num_sequences is not None, warpgroup, warpgroups,
        start + warpgroup * size, size,
    )  # fmt: skip


class Steps(NamedTuple):
    """The tiles of the other axis that a program visits, edges first; only these are masked.

    first_other: the sequence's first row. last_start: the first row of the last tile; None if every
    step has a tile.
    """

    visible: Visible
    block: int
    first_other: Any
    last_start: Any
    count: Any

    def start(self, step):
        return step_start(step, self.visible, self.block)

    def fetched(self, step):
        """Return the first row to fetch, among all sequences; without steps, that of any tile."""
        start = self.start(step)
        if self.last_start is not None:
            start = jnp.clip(start, 0, self.last_start)
        return self.first_other + start

    def walk(self, visit, carry):
        end_masked, steps = self.visible.before + self.visible.after, self.count
        for masked, lower, upper in ((True, 0, end_masked), (False, end_masked, steps)):
            if not (isinstance(upper, int) and lower == upper):

                def body(step, carry, masked=masked):
                    return visit(step, carry, masked)

                carry = lax.fori_loop(lower, upper, body, carry)
        return carry


def tiles_of_keys(queries, window, block):
    return _steps(queries, window, window.left, window.right, block)


def tiles_of_queries(keys, window, block, hide_missing=False):
    """Return the `Steps`; hide_missing masks all tiles if not all rows of the own tile exist."""
    return _steps(keys, window, window.right, window.left, block, hide_missing)


def _steps(rows, window, left, right, block, hide_missing=False):
    size, last_start = rows.size_other, None
    visible = visible_tiles(
        rows.start, rows.end, size, rows.diagonal, left, right, rows.block, block
    )
    if hide_missing:
        visible = visible.mask_all(rows.start + rows.block > rows.end)
    if not rows.packed and window != Window():
        last_start = pl.cdiv(size, block) * block - block
    _begin, before, full, after = visible
    return Steps(visible, block, rows.first_other, last_start, before + full + after)


def pair_scores(a, b, size, rows, start, end, rule, window, masked, m_warps=4, of_keys=False):
    """Compute the scores of a warpgroup's part of a tile, and the derivative of the cap.

    a and b are the own and the visited tile of q and k. Keys from `end` on, counted as the visited
    rows, are hidden.
    """
    s, layout = product_scores(a, b, size, m_warps), plgpu.Layout.MMA_ACC(b.dtype, m_warps=m_warps)
    position = key = None
    if masked:
        own = iota(s.shape, 0, layout) + (rows.part + rows.diagonal)
        other = iota(s.shape, 1, layout) + start
        position, key = (other, own) if of_keys else (own, other)
    return visible_scores(s, position, key, end, rule, window, masked, layout)
