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
from twin_attention.contract.operands import BlockSparseOperands
from twin_attention.contract.reference.block_sparse import (
    block_sparse_backward,
    block_sparse_forward,
)
from twin_attention.contract.spec import BlockSparseSpec, Window, tile_size


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


def test_a_band_stands_at_the_end():
    assert text(local_tiles(4, 4, 1, 0)) == ["#...", "##..", ".##.", "..##"]
    assert text(local_tiles(2, 4, 0, 1)) == ["..##", "...#"]
    assert text(local_tiles(4, 2, 1, 0)) == ["..", "..", "#.", "##"]


def test_a_stride_counts_from_the_own_tile():
    assert text(strided_tiles(3, 5, 2)) == ["#.#.#", ".#.#.", "#.#.#"]


def test_global_tiles_see_all_and_are_seen_by_all():
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


def test_the_reference_is_the_formula():
    rng, spec = np.random.default_rng(0), BlockSparseSpec(
        1, 130, 70, 2, 1, 16, 24, "float32", 0.3, Window(None, 0),
        tile_q=64, tile_kv=64, mask_batch=1, mask_heads=2,
    )  # fmt: skip
    q, k, v = rng.normal(size=(1, 130, 2, 16)), rng.normal(size=(1, 70, 1, 16)), None
    v = rng.normal(size=(1, 70, 1, 24))
    kept = np.array([[[0, 0], [1, 0], [1, 1]], [[0, 0], [0, 1], [0, 1]]], bool)
    operands = BlockSparseOperands(q, k, v, *BlockMask.of(kept))
    out, lse = block_sparse_forward(operands, spec, np.float64)
    for head, i in np.ndindex(2, 130):
        seen = [j for j in range(70) if kept[head, i // 64, j // 64] and j <= i - 60]
        if not seen:
            assert (out[0, i, head] == 0).all()
            assert lse[0, head, i] == -np.inf
            continue
        s = 0.3 * k[0, seen, 0] @ q[0, i, head]
        np.testing.assert_allclose(lse[0, head, i], np.log(np.exp(s).sum()), rtol=1e-12)
        p = np.exp(s) / np.exp(s).sum()
        np.testing.assert_allclose(out[0, i, head], p @ v[0, seen, 0], rtol=1e-11, atol=1e-14)
    dout, dlse = rng.normal(size=out.shape), rng.normal(size=lse.shape)
    got = block_sparse_backward(dout, dlse, operands, spec, np.float64)

    def loss(**changed):
        out, lse = block_sparse_forward(operands._replace(**changed), spec, np.float64)
        return (out * dout).sum() + (np.where(np.isinf(lse), 0, lse) * dlse).sum()

    for name in "qkv":
        x, step = getattr(operands, name), rng.normal(size=getattr(operands, name).shape)
        slope = (loss(**{name: x + 1e-6 * step}) - loss(**{name: x - 1e-6 * step})) / 2e-6
        np.testing.assert_allclose((getattr(got, name) * step).sum(), slope, rtol=1e-6)
