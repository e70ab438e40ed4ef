"""Packed sequences: all tiles in order of length, in a table that is computed on the device.

The lengths of sequences are data on the device. With the table a kernel's programs deal the tiles
out so that all of them end together, and none searches for the sequence of its tile.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_attn.kernels.portable.sequences import count_sequence_tiles, first_tile, rows_of_tile
from pallas_attn.kernels.portable.tiles import arange, cdiv, visible_tiles
from twin_attention.contract.spec import VarlenSpec

# What a row of the table has before that which `locate_tile` returns, and the number of all.
TILE, NUM_TILES = 0, 1
FIELDS = 8
# Heads that share the L2 cache at a time, at most.
HEADS_TOGETHER = 8


def order_tiles(
    cu_seqlens: Array, cu_seqlens_other: Array, spec: VarlenSpec, block: int, block_other: int
) -> Array:
    """Return the tiles of one axis of packed sequences, those first that see most of the other.

    The offsets are not checked: any numbers give rows within the tensors.

    Args:
        cu_seqlens, cu_seqlens_other: [N + 1] offsets of queries and keys; the other way round for
            tiles of keys.
        spec: the problem; for tiles of keys what `exchange_sides` makes of it.
        block, block_other: rows of a tile of both axes.

    Returns:
        int32 [most tiles, FIELDS]: for each tile its number, how many tiles have rows, the same in
        each row of the table, and what `locate_tile` returns. Tiles without rows are the last.
    """
    with jax.enable_x64(False):
        most = count_sequence_tiles(spec.seq_q, spec.num_sequences, block)
        tiles = arange(most)
        located = _locate_tiles(cu_seqlens, cu_seqlens_other, tiles, spec, block)
        *_, start, end, _first_other, size_other = located
        window = spec.bounded_window
        _begin, *steps = visible_tiles(
            start, end, size_other, size_other - end, window.left, window.right, block, block_other
        )
        # One number holds length and tile. Those that are too long for that count as equal.
        longest = (2**31 - 1) // most - 1
        steps = jnp.where(start < end, jnp.clip(sum(steps), 1, longest), 0)
        keys = lax.sort((longest - steps) * most + tiles)
        num_tiles = jnp.searchsorted(keys, longest * most, method="scan_unrolled")
        tiles = keys % most
        located = _locate_tiles(cu_seqlens, cu_seqlens_other, tiles, spec, block)
        columns = tiles, jnp.broadcast_to(num_tiles, tiles.shape), *located
        return jnp.stack([x.astype(jnp.int32) for x in columns], axis=1)


def _locate_tiles(cu_seqlens, cu_seqlens_other, tiles, spec, block):
    """Return what `locate_tile` does, of many tiles; a search that is one kernel of XLA's."""
    begins = first_tile(cu_seqlens, arange(spec.num_sequences + 1), block)
    sequences = jnp.searchsorted(begins, tiles, side="right", method="scan_unrolled") - 1
    sequences = jnp.maximum(sequences, 0)
    return rows_of_tile(
        cu_seqlens, cu_seqlens_other, sequences, tiles, spec.seq_q, spec.seq_kv, block
    )


def read_row(table_ref, row):
    """Return a row of the table: FIELDS scalars."""
    return tuple(table_ref[row, field] for field in range(FIELDS))


def for_each_ordered_tile(table_ref, heads, program, body):
    """Call body(head, row of the table, steps before) for the tiles of this program."""
    programs, num_tiles = lax.axis_size("program"), table_ref[0, NUM_TILES]

    def visit(turn, step):
        head, row = head_and_row(item_of_turn(turn, program, programs), heads, num_tiles)
        return body(head, row, step)

    turns = count_turns(heads * num_tiles, program, programs)
    lax.fori_loop(jnp.int32(0), turns, visit, jnp.int32(0))


def item_of_turn(turn, program, programs):
    """Return a program's item of a turn; every other turn takes the programs in reverse."""
    return turn * programs + jnp.where(turn % 2 == 0, program, programs - 1 - program)


def count_turns(num_items, program, programs):
    """Return how many of a program's items there are."""
    turns = num_items // programs
    return turns + (item_of_turn(turns, program, programs) < num_items).astype(jnp.int32)


def head_and_row(item, heads, num_tiles):
    """Return the head of an item, and the row of its tile in the table.

    Items are in order of HEADS_TOGETHER heads at a time, of these the longest tile of each head
    first. So the items of a turn are about as long as each other, and a program that had a longer
    one has a shorter one in the next turn.
    """
    together = cdiv(heads, cdiv(heads, HEADS_TOGETHER))
    first = item // (together * num_tiles) * together
    rest = item - first * num_tiles
    among = together if heads % together == 0 else jnp.minimum(together, heads - first)
    return first + rest % among, rest // among
