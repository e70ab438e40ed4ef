"""Check the table of the tiles of packed sequences, and how programs deal them out."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_attn.kernels.portable.sequences import count_sequence_tiles
from pallas_attn.kernels.sm90.packed_schedule import (
    NUM_TILES,
    TILE,
    count_turns,
    head_and_row,
    item_of_turn,
    order_tiles,
)
from twin_attention.contract.spec import VarlenSpec, Window
from twin_attention.targets.steps import exchange_sides, steps_of_queries

LENGTHS = [(300, 340), (0, 90), (700, 650), (1, 200), (129, 0), (128, 128)]
# Of queries and keys; what follows the sequences is padding.
TOKENS = 1300, 1500


def described(num_sequences, tokens=TOKENS, window=None):
    fields = dict.fromkeys(("batch", "heads_q", "heads_kv"), 1)
    return VarlenSpec(
        **fields, seq_q=tokens[0], seq_kv=tokens[1], head_dim=64, head_dim_v=64,
        dtype="bfloat16", scale=1.0, window=window or Window(), num_sequences=num_sequences,
    )  # fmt: skip


def offsets(lengths):
    cumulative = np.cumsum([(0, 0), *lengths], axis=0, dtype=np.int32)
    return cumulative[:, 0], cumulative[:, 1]


def ordered(cu_seqlens, cu_seqlens_other, spec, block, block_other):
    order = jax.jit(partial(order_tiles, spec=spec, block=block, block_other=block_other))
    table = np.asarray(order(jnp.asarray(cu_seqlens), jnp.asarray(cu_seqlens_other)))
    assert table.dtype == np.int32
    assert len(table) == count_sequence_tiles(spec.seq_q, spec.num_sequences, block)
    assert (table[:, NUM_TILES] == table[0, NUM_TILES]).all()
    return table


def expected(lengths, spec, block, block_other):
    """Return (steps, what `locate_tile` returns) of each tile with rows, by a loop over all."""
    tiles, first, first_other = [], 0, 0
    padding = spec.seq_q - sum(own for own, _ in lengths)
    for sequence, (own, other) in enumerate([*lengths, (padding, 0)]):
        alone = spec.sequence(own, other)
        steps = steps_of_queries(alone, block, block_other)[::-1] if own else ()
        tiles += [
            (count, sequence, first, first + i * block, first + own, first_other, other)
            for i, count in enumerate(steps)
        ]
        first, first_other = first + own, first_other + other
    return tiles


@pytest.mark.parametrize(
    "window", [Window(), Window(None, 0), Window(100, 0), Window(50, 70)], ids=str
)
@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize(("block", "block_other"), [(128, 128), (192, 64)])
def test_each_tile_is_there_once_and_the_longest_come_first(window, of_keys, block, block_other):
    cu_seqlens = offsets(LENGTHS)
    spec, lengths = described(len(LENGTHS), window=window), LENGTHS
    if of_keys:
        cu_seqlens, spec = cu_seqlens[::-1], exchange_sides(spec)
        lengths = [pair[::-1] for pair in lengths]
    table = ordered(*cu_seqlens, spec, block, block_other)
    want = expected(lengths, spec, block, block_other)
    assert table[0, NUM_TILES] == len(want)
    assert sorted(table[:, TILE]) == [*range(len(table))]
    steps = {tuple(located): count for count, *located in want}
    got = [tuple(row) for row in table[: len(want), NUM_TILES + 1 :].tolist()]
    assert sorted(got) == sorted(steps)
    counts = [steps[row] for row in got]
    assert counts == sorted(counts, reverse=True)
    start, end = table[len(want) :, NUM_TILES + 3 : NUM_TILES + 5].T
    assert (start == end).all()


@pytest.mark.parametrize(
    "bad",
    [[0, 500, -9, 30, 2], [-5, -4, -3, 1, 1], [2**31 - 1] * 5, [7, 6, -(2**31), 4, 3]],
    ids=str,
)
def test_wrong_offsets_stay_inside_the_tensors(bad):
    bad, good = np.asarray(bad, np.int32), np.arange(5, dtype=np.int32)
    for of_rows, of_others in ((bad, good), (good, bad), (bad, bad)):
        table = ordered(of_rows, of_others, described(4, window=Window(None, 0)), 16, 16)
        tile, num_tiles, sequence, first, start, end, first_other, size_other = table.T
        assert sorted(tile) == [*range(len(table))]
        assert ((sequence >= 0) & (sequence <= 4)).all()
        assert ((first >= 0) & (first <= start) & (start <= end) & (end <= TOKENS[0])).all()
        assert ((first_other >= 0) & (first_other + size_other <= TOKENS[1])).all()
        assert (size_other >= 0).all()
        assert ((start < end) == (np.arange(len(table)) < num_tiles)).all()


def test_many_tiles_and_long_ones():
    """The keys of the sort fit 32 bits: lengths that are too long for them count as equal."""
    tokens = 2**24
    lengths = [(tokens - 2**20, tokens), *[(2**15, 0)] * 32]
    spec = described(len(lengths), (tokens, tokens), Window(None, 0))
    table = ordered(*offsets(lengths), spec, 128, 128)
    assert sorted(table[:, TILE]) == [*range(len(table))]
    assert table[0, NUM_TILES] == tokens // 128
    sequence = table[:, NUM_TILES + 1]
    assert (sequence[: (tokens - 2**20) // 128] == 0).all()


@pytest.mark.parametrize("heads", [1, 3, 8, 12, 20])
@pytest.mark.parametrize(("num_tiles", "programs"), [(1, 5), (7, 4), (30, 132)])
def test_programs_have_each_tile_of_each_head_once(heads, num_tiles, programs):
    own = jnp.arange(programs)
    turns = count_turns(jnp.int32(heads * num_tiles), own, programs)
    seen = []
    for turn in range(int(turns.max())):
        items = item_of_turn(jnp.int32(turn), own, programs)[turns > turn]
        seen += zip(*(x.tolist() for x in head_and_row(items, heads, num_tiles)), strict=True)
    assert sorted(seen) == [(head, row) for head in range(heads) for row in range(num_tiles)]


def test_programs_end_together():
    """Sixteen heads of sixteen causal documents of 1024 tokens, on the SMs of an H100."""
    spec = described(16, (16384, 16384), Window(None, 0))
    table = ordered(*offsets([(1024, 1024)] * 16), spec, 128, 128)
    num_tiles, programs, heads = table[0, NUM_TILES], 132, 16
    steps = (table[:, NUM_TILES + 3] - table[:, NUM_TILES + 2]) // 128 + 1.0
    work = np.zeros(programs)
    for turn in range(-(-heads * num_tiles // programs)):
        items = np.asarray(item_of_turn(turn, np.arange(programs), programs))
        exists = items < heads * num_tiles
        _, rows = head_and_row(items[exists], heads, num_tiles)
        work[exists] += steps[np.asarray(rows)] + 1.5
    assert work.mean() / work.max() > 0.95
