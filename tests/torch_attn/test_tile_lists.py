from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.torch_attn.explicit_kernels import gluon_backend
from tests.torch_attn.gluon_interpreter import WRITES_FIRST, interpreted
from torch_attn.kernels.tile_lists import (
    ALIKE,
    HEADER,
    OTHERS_PADDED,
    PADDED,
    ROW,
    allocate_lists,
    listed_mask,
)
from twin_attention.contract.operands import FlashOperands, VarlenOperands
from twin_attention.contract.spec import AttentionSpec, VarlenSpec, Window
from twin_attention.interop.parity.ranges import make_ranges
from twin_attention.targets.family import Backend, choose

KERNELS = ("flash_fwd", "flash_bwd_dq", "flash_bwd_dkdv")


@st.composite
def lengths(draw):
    return draw(st.integers(1, 300)), draw(st.integers(1, 300))


def random_ids(generator: torch.Generator, size: int, is_sorted: bool) -> torch.Tensor:
    stretch = torch.arange(size) // 150
    ids = torch.randint(-1, 3, (int(stretch.max()) + 1,), generator=generator)
    return (ids.sort().values if is_sorted else ids)[stretch].int()


def random_ends(generator: torch.Generator, size: int) -> torch.Tensor:
    stretch = torch.arange(size) // 90
    values = torch.randint(-9, size + 9, (int(stretch.max()) + 1,), generator=generator)
    values[torch.rand(len(values), generator=generator) < 0.3] = 2**31 - 1
    return values[stretch].int()


@settings(max_examples=8, deadline=None)
@given(lengths(), *[st.booleans()] * 4, st.integers(0, 999), st.data())
def test_lists_hold_what_is_seen(sizes, has_ids, is_sorted, has_ends, has_ranges, seed, data):
    generator = torch.Generator().manual_seed(seed)
    size_q, size_kv = sizes
    has_ends = has_ends or not (has_ids or has_ranges)
    window = Window(data.draw(st.sampled_from([None, 70])), 0 if has_ends or has_ranges else None)
    q, kv = torch.zeros(2, size_q, 1, 16).half(), torch.zeros(2, size_kv, 1, 16).half()
    options: dict[str, Any] = {}
    seen = visible(size_q, size_kv, window)[None].repeat(2, 1, 1)
    ids_q, ids_kv = (
        torch.stack([random_ids(generator, x, is_sorted) for _ in range(2)]) for x in sizes
    )
    if has_ends:
        ends = torch.stack([random_ends(generator, size_kv) for _ in range(2)])
        options |= {"kv_ends": ends}
        seen &= torch.arange(size_q)[:, None] + size_kv - size_q < ends[:, None]
    if has_ranges:
        kind = data.draw(st.sampled_from(["prefix", "spans", "any"]))
        random = Random(seed)
        ranges = torch.stack([make_ranges(kind, size_q, size_kv, random) for _ in range(2)])
        options |= {"q_ranges": ranges}
        key = torch.arange(size_kv)
        seen |= ((ranges[..., :1] <= key) & (key < ranges[..., 1:])).any(2)
    if has_ids:
        options |= {"q_segment_ids": ids_q, "kv_segment_ids": ids_kv}
        seen &= (ids_q[:, :, None] == ids_kv[:, None]) & (ids_q >= 0)[:, :, None]
    spec = AttentionSpec(
        2, size_q, size_kv, 1, 1, 16, 16, "float16", 1.0, window, deterministic=True,
        segmented=has_ids, tree=has_ends, ranges=ranges.shape[2] if has_ranges else 0,
    )  # fmt: skip
    operands = FlashOperands(q, kv, kv, **options)
    for kernel in KERNELS:
        lists, block, other = lists_of(kernel, operands, spec)
        pairs = seen if kernel != "flash_bwd_dkdv" else seen.mT
        padding = (ids_q < 0, ids_kv < 0)[:: 1 if kernel != "flash_bwd_dkdv" else -1]
        for element in range(2):
            own, others = (x[element] if has_ids else x[element] & False for x in padding)
            ids = (ids_q, ids_kv)[:: 1 if kernel != "flash_bwd_dkdv" else -1]
            ids = [x[element] for x in ids] if has_ids else None
            check_lists(lists[element], pairs[element], block, other, own, others, ids=ids)


@pytest.mark.parametrize("kernel", KERNELS)
def test_lists_of_a_window_of_depths(kernel):
    """One sequence's depths grow more slowly than the other's."""
    q = torch.zeros(2, 300, 1, 16).half()
    ends = torch.full((2, 300), 2**31 - 1, dtype=torch.int32)
    per_depth = torch.tensor([[20], [10]])
    depths = [(torch.arange(300) // x).int() for x in (per_depth, per_depth + 5)]
    operands = FlashOperands(q, q, q, kv_ends=ends, q_depths=depths[0], kv_depths=depths[1])
    spec = AttentionSpec(
        2, 300, 300, 1, 1, 16, 16, "float16", 1.0, Window(9, 0), deterministic=True, tree=True,
        depths=True,
    )  # fmt: skip
    pairs = visible(300, 300, Window(None, 0)) & (depths[0][:, :, None] - depths[1][:, None] <= 9)
    pairs = pairs if kernel != "flash_bwd_dkdv" else pairs.mT
    lists, block, other = lists_of(kernel, operands, spec)
    nothing = torch.zeros(300, dtype=torch.bool)
    for element in range(2):
        check_lists(lists[element], pairs[element], block, other, nothing, nothing)


@pytest.mark.parametrize("kernel", KERNELS)
def test_lists_of_packed_trees(kernel):
    generator = torch.Generator().manual_seed(0)
    offsets_q, offsets_kv = [0, 150, 150, 400], [0, 200, 230, 500]
    ends = [random_ends(generator, b - a) for a, b in pairwise(offsets_kv)]
    cu_q, cu_kv = (torch.tensor(x, dtype=torch.int32) for x in (offsets_q, offsets_kv))
    q, kv = torch.zeros(409, 1, 16).half(), torch.zeros(505, 1, 16).half()
    given = torch.cat([*ends, torch.zeros(5, dtype=torch.int32)])
    operands = VarlenOperands(q, kv, kv, cu_q, cu_kv, kv_ends=given)
    window = Window(None, 0)
    spec = VarlenSpec(
        1, 409, 505, 1, 1, 16, 16, "float16", 1.0, window,
        deterministic=True,
        tree=True,
        num_sequences=3,
    )  # fmt: skip
    lists, block, other = lists_of(kernel, operands, spec)
    stays = offsets_q if kernel != "flash_bwd_dkdv" else offsets_kv
    for n, (pair_q, pair_kv) in enumerate(
        zip(pairwise(offsets_q), pairwise(offsets_kv), strict=True)
    ):
        sizes = pair_q[1] - pair_q[0], pair_kv[1] - pair_kv[0]
        position = torch.arange(sizes[0])[:, None] + sizes[1] - sizes[0]
        pairs = visible(*sizes, window) & (position < ends[n])
        pairs = pairs if kernel != "flash_bwd_dkdv" else pairs.mT
        first = stays[n] // block + n
        own = lists[0, first : first + -(-len(pairs) // block)]
        nothing = (torch.zeros(size, dtype=torch.bool) for size in pairs.shape)
        check_lists(own, pairs, block, other, *nothing)


def visible(size_q: int, size_kv: int, window: Window) -> torch.Tensor:
    position = torch.arange(size_q)[:, None] + size_kv - size_q
    key, seen = torch.arange(size_kv), torch.ones(size_q, size_kv, dtype=torch.bool)
    if window.left is not None:
        seen &= key >= position - window.left
    return seen if window.right is None else seen & (key <= position + window.right)


def lists_of(kernel, operands, spec) -> tuple[torch.Tensor, int, int]:
    """Return a kernel's lists, and the rows of its tiles: which stay, and which are visited."""
    backend: Backend = gluon_backend("sm80")
    with interpreted(WRITES_FIRST):
        mask = listed_mask(kernel, operands, spec, backend)
    config = backend.configs(spec)[kernel]
    blocks = [config.block_q, config.block_kv]
    stays, visited = blocks if kernel != "flash_bwd_dkdv" else blocks[::-1]
    size_visited = spec.seq_kv if kernel != "flash_bwd_dkdv" else spec.seq_q
    width = 2 * -(-size_visited // visited) + HEADER.value
    lists = mask.tiles
    assert lists is not None
    assert lists[0] == 0
    return lists[1:].view(spec.batch, -1, width), stays, visited


def check_lists(lists, pairs, block: int, other: int, padding, padding_of_others, ids=None) -> None:
    """Compare lists with the pairs [rows, others] that are seen, and with what is padding."""
    middle = (lists.shape[1] - HEADER.value) // 2
    rows = zip(pairs.split(block), padding.split(block), lists.tolist(), strict=len(pairs) > 0)
    for n, (row, is_padding, entries) in enumerate(rows):
        num_masked, num_whole, has_padding = entries[middle : middle + 3]
        masked = entries[middle - num_masked : middle]
        behind = middle + HEADER.value
        whole = entries[behind : behind + num_whole]
        found = masked + whole
        starts = [x & ROW.value for x in found]
        assert len({*starts}) == len(starts)
        tiles, of_others = row.split(other, 1), padding_of_others.split(other)
        assert {n * other for n, tile in enumerate(tiles) if tile.any()} <= {*starts}
        assert all(tiles[x // other].all() and x & PADDED.value == 0 for x in whole)
        assert all(x & PADDED.value or not of_others[x // other].any() for x in masked)
        assert has_padding & PADDED.value == is_padding.any()
        any_padded = any(x & PADDED.value for x in found) or not found
        assert (has_padding & OTHERS_PADDED.value != 0) == any_padded
        for x in found:
            if x & ALIKE.value:
                assert ids is not None
                own, others = ids[0].split(block)[n], ids[1].split(other)[(x & ROW.value) // other]
                assert len({*own.tolist(), *others.tolist()}) == 1
                assert own[0] >= 0


@pytest.mark.parametrize("field", ["segmented", "tree"])
def test_lists_take_at_most_70_megabytes(field):
    """Problems whose lists would take more run in the portable kernels."""
    taken = []
    for exponent in range(14, 23):
        spec = VarlenSpec(
            1, 2**exponent, 2**exponent, 8, 2, 64, 64, "bfloat16", 0.1, num_sequences=64
        )
        spec = replace(spec, **{field: True})
        backend, _ = choose("torch_attn", None, "flash_fwd", spec, "sm90", True)
        if backend.family.folder != "portable":
            q = torch.empty(2**exponent, 8, 64, device="meta")
            lists = allocate_lists(q, spec, True, 128, 64)
            taken.append(lists.numel() * lists.itemsize)
    assert len(taken) > 3
    assert max(taken) < 70e6
