import numpy as np
import pytest

from twin_attention.contract.block_mask import (
    BlockMask,
    document_tiles,
    global_tiles,
    local_tiles,
    random_tiles,
    strided_tiles,
)
from twin_attention.contract.spec import tile_size


def text(kept):
    return ["".join(".#"[int(x)] for x in row) for row in kept]


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5), (2, 4, 3, 5), (1, 1, 0, 5)])
def test_lists_hold_the_tiles_that_are_kept_both_ways(shape):
    kept = np.random.default_rng(0).random(shape) < 0.4
    mask = BlockMask.of(kept)
    kept = kept.reshape((1,) * (4 - kept.ndim) + shape)
    assert {x.dtype for x in mask} == {np.dtype("int32")}
    ways = (kept, mask.kv_counts, mask.kv_tiles), (kept.swapaxes(2, 3), mask.q_counts, mask.q_tiles)
    for of_lists, counts, tiles in ways:
        assert tiles.shape == of_lists.shape
        for place in np.ndindex(of_lists.shape[:3]):
            want = np.flatnonzero(of_lists[place])
            assert tiles[place][: counts[place]].tolist() == want.tolist()


def test_bands_stand_at_the_end_strides_count_from_the_own_tile_and_global_ones_see_all():
    assert text(local_tiles(4, 4, 1, 0)) == ["#...", "##..", ".##.", "..##"]
    assert text(local_tiles(2, 4, 0, 1)) == ["..##", "...#"]
    assert text(local_tiles(4, 2, 1, 0)) == ["..", "..", "#.", "##"]
    assert text(strided_tiles(3, 5, 2)) == ["#.#.#", ".#.#.", "#.#.#"]
    assert text(global_tiles(3, 4, 1)) == ["####", "#...", "#..."]


def test_random_tiles_are_so_many_and_the_same_again():
    kept = random_tiles(6, 9, 3, seed=1)
    assert (kept.sum(1) == 3).all()
    assert (kept == random_tiles(6, 9, 3, seed=1)).all()
    assert (kept != random_tiles(6, 9, 3, seed=2)).any()
    assert random_tiles(2, 4, 9, seed=0).all()


def test_tiles_of_documents_are_those_that_share_one():
    ids = np.repeat([4, 0, -1, 7], [70, 58, 64, 40])
    kept = document_tiles(ids, ids, 64, 64)
    assert text(kept) == ["##..", "##..", "....", "...#"]
    batch = np.stack([ids, np.zeros_like(ids)])
    both = document_tiles(batch, batch, 64, 128)
    assert both.shape == (2, 1, 4, 2)
    assert text(both[0, 0]) == ["#.", "#.", "..", ".#"]
    assert both[1].all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: local_tiles(-1, 4, 0, 0), ValueError, "tiles_q: expected an integer from 0 to"),
        (lambda: local_tiles(4, 4, 0.5, 0), TypeError, "left: expected an integer from 0 to"),
        (lambda: strided_tiles(4, 4, 0), ValueError, "stride: expected an integer from 1 to"),
        (lambda: random_tiles(4, 4, 1, None), TypeError, "seed: expected an integer from 0 to"),
        (lambda: document_tiles(np.zeros((1, 4)), np.zeros((2, 4)), 64, 64), ValueError,
         r"kv_ids: expected q_ids' batch \(1,\) of 1 axis, got \(2,\)"),
    ],
)  # fmt: skip
def test_bad_patterns_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_number_of_tiles_tells_their_size():
    assert [tile_size(1000, tiles) for tiles in (16, 8, 9)] == [64, 128, None]
    assert tile_size(0, 0) is not None
    assert tile_size(64, 1) == 64  # of 128 as well: there is one tile
