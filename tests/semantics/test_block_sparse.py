import re

import pytest
import torch

from tests.sides import by_reference
from twin_attention.contract.block_mask import BlockMask
from twin_attention.interop.exchange import to_torch
from twin_attention.interop.parity.cases import BlockSparseCase
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.sides import results
from twin_attention.targets.config import use_configs

CASE = BlockSparseCase(
    "sparse", batch=1, seq_q=150, seq_kv=200, heads_q=2, heads_kv=2, head_dim=16, head_dim_v=24,
    dtype="float32", causal=True, own_masks="heads",
)  # fmt: skip
LARGE_TILES = {
    kernel: {"block_q": 64, "block_kv": 64}
    for kernel in ("flash_fwd", "flash_bwd_dq", "flash_bwd_dkdv")
}
OPTIONS = CASE.options | {"implementation": "triton"}


def sparse(side, inputs):
    with use_configs(LARGE_TILES):
        return results(side, "block_sparse_attention", inputs, **OPTIONS)


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-5, atol=1e-5)


@pytest.fixture
def inputs(torch_device):
    return make_inputs(CASE, torch_device)


def mask_of(inputs, *rows):
    """Return a mask [1, 1, 3, 4] of rows such as ".##."; 64 queries and keys a tile."""
    kept = [[[[tile == "#" for tile in row] for row in rows]]]
    return torch.tensor(kept, device=inputs["q"].device)


def test_all_tiles_are_flash_attention(side, inputs):
    plain = {name: x for name, x in inputs.items() if name != "block_mask"}
    inputs["block_mask"] = torch.ones_like(inputs["block_mask"])
    assert_same(sparse(side, inputs), by_reference(plain, **CASE.options))


def test_a_dropped_tile_has_no_influence(side, inputs):
    """Bit for bit: kernels do not read it."""
    inputs["block_mask"] = mask_of(inputs, "#.#.", "....", "#.##").expand(1, 2, 3, 4).contiguous()
    want = sparse(side, inputs)
    for name in ("k", "v"):
        inputs[name][:, 64:128] = torch.nan
    for name in ("q", "dout"):
        inputs[name][:, 64:128] = torch.nan
    got = sparse(side, inputs)
    for name in ("out", "dq"):  # the tile of queries without keys gives what a NaN does not reach
        assert (want[name][:, 64:128] == 0).all()
    assert (got["lse"][..., 64:128] == -torch.inf).all()
    assert (got["out"][:, 64:128] == 0).all()
    for name in ("dk", "dv"):
        assert (got[name][:, 64:128] == 0).all()
        assert torch.equal(got[name], want[name])
    rows = [*range(64), *range(128, 150)]
    for name in ("out", "dq"):
        assert torch.equal(got[name][:, rows], want[name][:, rows])


def lists_forward(side, inputs, lists):
    operands = side.share({name: inputs[name] for name in "qkv"})
    mask = BlockMask(**side.share(lists._asdict()))
    with use_configs(LARGE_TILES):
        found = side.api.block_sparse_attention(
            **operands, block_mask=mask, causal=True, return_lse=True, implementation="triton"
        )
    return tuple(x if torch.is_tensor(x) else to_torch(x) for x in found)


def test_what_follows_the_count_of_a_list_does_not_matter(side, inputs):
    lists = BlockMask.of(inputs["block_mask"])
    want = lists_forward(side, inputs, lists)
    place = torch.arange(lists.kv_tiles.shape[-1], device=lists.kv_tiles.device)
    spoiled = torch.where(place < lists.kv_counts[..., None], lists.kv_tiles, -(2**31))
    got = lists_forward(side, inputs, lists._replace(kv_tiles=spoiled.int()))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("tile", [-1, 4, 2**31 - 1])
def test_tiles_that_do_not_exist_are_not_read(side, inputs, tile):
    """At the ends of a list nothing is seen there. A list in disorder gives some keys' values."""
    lists = BlockMask.of(mask_of(inputs, "##..", "##..", "##.."))
    want = lists_forward(side, inputs, lists)
    place, count = (0, 3) if tile < 0 else (2, 3)
    ids = [0, 1]
    ids.insert(place, tile)
    own = lists.kv_tiles.clone()
    own[..., :3] = torch.tensor(ids, dtype=torch.int32)
    changed = lists._replace(kv_tiles=own, kv_counts=torch.full_like(lists.kv_counts, count))
    for a, b in zip(lists_forward(side, inputs, changed), want, strict=True):
        assert torch.equal(a, b)
    inputs["v"][:] = 1.0
    disorder = lists._replace(
        kv_tiles=torch.full_like(own, tile), kv_counts=torch.full_like(lists.kv_counts, 99)
    )
    out, _ = lists_forward(side, inputs, disorder)
    ones = torch.ones_like(out)
    assert (torch.isclose(out, ones) | (out == 0)).all()


def check_lists(side, mask, **changes):
    """Check a mask with some lists changed at a place: `kv_tiles=((0, 0, 1, 0), 7)`."""
    lists = mask._asdict()
    for name, (place, value) in changes.items():
        lists[name] = lists[name].clone()
        lists[name][place] = value
    return side.api.check_block_mask(BlockMask(**side.share(lists)))


@pytest.fixture
def tiles(inputs):
    return BlockMask.of(mask_of(inputs, "##.#", "....", "..##").repeat(1, 2, 1, 1))


def test_check_block_mask_takes_what_is_right(side, tiles):
    assert check_lists(side, tiles) is None
    check_lists(side, tiles, kv_tiles=((0, 0, 0, 3), -9), q_tiles=((0, 1, 2, 1), 2**31 - 1))
    check_lists(side, tiles._replace(kv_tiles=tiles.kv_tiles[..., :3].contiguous()))
    nothing = torch.zeros(1, 1, 0, 4, dtype=torch.bool, device=tiles.q_tiles.device)
    check_lists(side, BlockMask.of(nothing))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_counts": ((0, 1, 2), -1)},
         "kv_counts[0, 1, 2]: expected a count from 0 to 4, got -1"),
        ({"q_counts": ((0, 0, 3), 4)}, "q_counts[0, 0, 3]: expected a count from 0 to 3, got 4"),
        ({"kv_tiles": ((0, 1, 0, 2), 4)},
         "kv_tiles[0, 1, 0, 2]: expected a tile from 0 to 3, got 4"),
        ({"kv_tiles": ((0, 0, 0, 0), -1)},
         "kv_tiles[0, 0, 0, 0]: expected a tile from 0 to 3, got -1"),
        ({"q_tiles": ((0, 0, 3, 1), 0)}, "q_tiles[0, 0, 3, 1]: expected a tile after 0, got 0"),
        ({"kv_tiles": ((0, 1, 0, 1), 2)},
         "kv_tiles[0, 1, 0]: expected tile 1 in it, as q_tiles[0, 1, 1] has tile 0, got none"),
        ({"q_counts": ((0, 0, 2), 0)},
         "q_tiles[0, 0, 2]: expected tile 2 in it, as kv_tiles[0, 0, 2] has tile 2, got none"),
        # The first of several: counts before tiles, of queries' lists before keys'.
        ({"kv_tiles": ((0, 0, 0, 1), 9), "q_tiles": ((0, 0, 0, 0), 9)},
         "kv_tiles[0, 0, 0, 1]: expected a tile from 0 to 3, got 9"),
    ],
    ids=str,
)  # fmt: skip
def test_check_block_mask_names_the_first_bad_entry(side, tiles, changes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_lists(side, tiles, **changes)


def test_check_block_mask_refuses_what_block_sparse_attention_does(side, tiles):
    with pytest.raises(TypeError, match=r"^block_mask: expected a BlockMask, got "):
        side.api.check_block_mask(tiles.kv_tiles > 0)
    with pytest.raises(TypeError, match=r"^q_tiles: expected dtype int32, got"):
        check_lists(side, tiles._replace(q_tiles=tiles.q_tiles.float()))
    one = {name: getattr(tiles, name)[:, :1].contiguous() for name in ("q_counts", "q_tiles")}
    with pytest.raises(ValueError, match=r"^q_counts: expected kv_counts' masks \(1, 2\), got"):
        check_lists(side, tiles._replace(**one))
    with pytest.raises(ValueError, match=r"^kv_tiles: expected shape \(1, 2, 3, width\) and"):
        check_lists(side, tiles._replace(kv_tiles=tiles.kv_tiles[..., :0]))


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "got"),
    [
        ((3,), "bool", ValueError, "2 to 4 dimensions"),
        ((1, 1, 1, 3, 3), "bool", ValueError, "2 to 4 dimensions"),
        ((3, 3), "float32", TypeError, "dtype bool, got float32"),
    ],
)
def test_a_mask_is_checked_before_its_lists_are_made(side, shape, dtype, error, got):
    with pytest.raises(error, match=f"^kept: expected {got}"):
        BlockMask.of(side.zeros(shape, dtype))


@pytest.mark.parametrize("kept", [None, [[True]], 1.0])
def test_lists_are_made_of_arrays_alone(kept):
    with pytest.raises(TypeError, match=r"^kept: expected an array of booleans, got "):
        BlockMask.of(kept)
