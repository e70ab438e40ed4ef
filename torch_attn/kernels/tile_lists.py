"""List the tiles that each tile of rows visits, in the kernel that runs before the explicit ones.

Segment ids, ends of keys and ranges are data on the device, and all roles of an explicit kernel
must visit the same tiles. So a kernel lists them once for all heads: tiles that need a mask, and
tiles that every row sees in full (Wang et al. 2024, FlashMask). These data are unchecked: a list
has only tiles that the window or a range shows, and omits none that is seen.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_attn.kernels.library.block_mask import lists_of_keys, lists_of_queries
from torch_attn.kernels.library.intervals import intervals_of_keys, intervals_of_queries
from torch_attn.kernels.library.mask import Mask, mask_argument
from torch_attn.kernels.library.query_ranges import (
    bounds_of_queries,
    ranges_of,
    tiles_in_bounds,
    with_number,
)
from torch_attn.kernels.library.ranges import LARGEST
from torch_attn.kernels.library.segments import VISITED, Segments, segments_of
from torch_attn.kernels.library.sequences import (
    count_sequence_tiles,
    locate_tile,
    num_sequence_tiles,
    offsets_of,
)
from torch_attn.kernels.library.tiles import visible_tiles
from torch_attn.kernels.library.tree import Tree, depths_of, ends_of
from torch_attn.launch import (
    UNSPECIALIZED,
    KernelCall,
    Prepared,
    config_of,
    flash_arguments,
    launch,
)
from twin_attention.contract.operands import AttentionOperands
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import Backend
from twin_attention.targets.kernels import FlashConfig

# The header in the middle of a list: how many tiles need a mask, how many need none, and what has
# padding: PADDED for the list's own rows, OTHERS_PADDED for one of its tiles.
HEADER = tl.constexpr(3)
OTHERS_PADDED = tl.constexpr(2)
# An entry is a tile's first row, with these bits: PADDED, the tile has padding; ALIKE, the tile and
# the list's own rows have the same single segment, and no padding.
PADDED, ALIKE, ROW = tl.constexpr(1), tl.constexpr(2), tl.constexpr(-4)
# Rows of a tile that one warp reads at a time: no other warp needs them.
LANES = tl.constexpr(32)


@triton.jit(do_not_specialize=[x for x in UNSPECIALIZED if x != "together"])
def tile_lists_kernel(
    lists_ptr, ids_ptr, other_ids_ptr, ends_ptr, depths_ptr, other_depths_ptr, ranges,
    cu_seqlens_ptr, cu_seqlens_other_ptr, seq_q, seq_kv, diagonal, num_sequences, window_left,
    window_right, OF_KEYS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
    SCAN_ROWS: tl.constexpr,
):  # fmt: skip
    """One program lists the tiles that one tile of rows visits.

    OF_KEYS: tiles of keys, for BLOCK_Q queries; otherwise tiles of queries, for BLOCK_KV keys. Both
    sizes are powers of two, and divide SCAN_ROWS, the rows read at a time. Grid: (tiles · batch),
    or `count_sequence_tiles` of packed sequences.

    Operands, of the rows and of the others: ids [B, Sq] and [B, Skv], ends [B, Skv] or [Tkv],
    `Depths`, `QueryRanges`, int32 and contiguous, or None. lists int32: a counter of work items,
    which is set to 0; then [B, tiles, 2 T + HEADER], where T is how many tiles there may be, at
    least 1. A list's header starts at entry T. After it come the tiles that need no mask; before
    it, last one first, those that need one. If nothing is visible, tile 0 is in both places and is
    not counted: a reader may have to fetch one.
    """
    # Locate the tile of rows.
    BLOCK: tl.constexpr = BLOCK_Q if OF_KEYS else BLOCK_KV
    OTHER: tl.constexpr = BLOCK_KV if OF_KEYS else BLOCK_Q
    size, size_other, left, right = seq_q, seq_kv, window_left, window_right
    if not OF_KEYS:
        size, size_other, left, right = seq_kv, seq_q, window_right, window_left
        diagonal = -diagonal
    num_tiles = count_sequence_tiles(size, num_sequences, BLOCK)
    tile, batch = tl.program_id(0) % num_tiles, (tl.program_id(0) // num_tiles).to(tl.int64)
    most = tl.maximum(tl.cdiv(size_other, OTHER), 1)
    middle_ptr = lists_ptr + (1 + most) + tl.program_id(0).to(tl.int64) * (2 * most + HEADER)
    first, start, end = 0, tile * BLOCK, size
    row, row_other = batch * size, batch * size_other
    if num_sequences is not None:
        _sequence, first, start, end, first_other, size_other = locate_tile(
            cu_seqlens_ptr, cu_seqlens_other_ptr, tile, size, size_other, num_sequences, BLOCK
        )
        row_other = first_other.to(tl.int64)
        diagonal = size_other - end
    begin, before, full, after = visible_tiles(
        start, end, size_other, diagonal, left, right, BLOCK, OTHER
    )

    # Read the ids, ends and depths of its rows.
    rows = start + tl.arange(0, BLOCK)
    exists = rows < end
    least, low, high = _own_bounds(ids_ptr, row, rows, exists, VISITED)
    first_end, last_end = 0, 0
    if not OF_KEYS:
        first_end, _low_end, last_end = _own_bounds(ends_ptr, row, rows, exists, 0)
    least_depth, _low_depth, greatest_depth = _own_bounds(depths_ptr, row, rows, exists, -LARGEST)

    # List the tiles that its rows may see: of the window, or with ranges of all.
    first_tile, num_shown = begin // OTHER, before + full + after
    first_step, last_step = 0, num_shown
    if ranges is not None:
        first_step, last_step = -first_tile, tl.cdiv(size_other, OTHER) - first_tile
        if OF_KEYS:
            bounds = bounds_of_queries(ranges, row + rows, exists, size_other)
    num_masked, num_whole = 0, 0
    TILES: tl.constexpr = SCAN_ROWS // OTHER
    padded = tl.zeros([TILES], tl.int32)
    for step in tl.range(first_step, last_step, TILES, num_stages=1):
        index = step + tl.arange(0, TILES)
        starts = (first_tile + index) * OTHER
        tile_exists = index < last_step
        in_window = tile_exists
        if ranges is not None:
            in_window = (index >= 0) & (index < num_shown)
        seen, whole = in_window, in_window & (index >= before) & (index < before + full)
        if ends_ptr is not None:
            if OF_KEYS:
                # Positions are counted as keys are.
                least_end, greatest_end, _ = _bounds(
                    ends_ptr + row_other, starts, in_window, size_other, 0, OTHER
                )
                seen &= greatest_end > start + diagonal
                whole &= least_end > tl.minimum(start + BLOCK, end) - 1 + diagonal
            else:
                position = starts - diagonal - first
                seen &= position < last_end
                whole &= position + OTHER - 1 < first_end
        if depths_ptr is not None:
            shallow, deep, _ = _bounds(
                other_depths_ptr + row_other, starts, in_window, size_other,
                -LARGEST if OF_KEYS else LARGEST, OTHER,
            )  # fmt: skip
            if OF_KEYS:
                seen &= deep >= least_depth
                whole &= shallow >= greatest_depth
            else:
                seen &= shallow <= greatest_depth
                whole &= deep <= least_depth
        whole &= seen
        if ranges is not None:
            if OF_KEYS:
                in_part, in_full = tiles_in_bounds(bounds, starts, OTHER)
            else:
                in_part, in_full = _tiles_in_ranges(
                    ranges, row_other, starts, tile_exists, size_other, start - first,
                    tl.minimum(start + BLOCK, end) - first, OTHER,
                )  # fmt: skip
            seen |= tile_exists & in_part
            whole |= tile_exists & in_part & in_full
        whole &= starts + OTHER <= size_other
        if not OF_KEYS:
            whole &= start + BLOCK <= end
        bits = tl.zeros([TILES], tl.int32)
        if ids_ptr is not None:
            meets, alike, bits = _meeting_tiles(
                other_ids_ptr + row_other, starts, tile_exists, size_other, least, low, high, OTHER
            )
            if not OF_KEYS:
                # Nonexistent keys are hidden by their ids.
                alike &= start + BLOCK <= end
            bits += tl.where(alike, ALIKE, 0)
            seen &= meets
            whole &= seen & alike
        num_masked, num_whole = _append(
            middle_ptr, starts, bits, seen, whole, num_masked, num_whole
        )
        padded |= tl.where(seen, bits, 0)
    others_padded = tl.max(padded & PADDED, 0)
    if num_masked + num_whole == 0:
        tl.store(middle_ptr - 1, PADDED)
        tl.store(middle_ptr + HEADER, PADDED)
        others_padded = 1
    if tl.program_id(0) == 0:
        tl.store(lists_ptr, 0)
    tl.store(middle_ptr, num_masked)
    tl.store(middle_ptr + 1, num_whole)
    own_padded = (least < 0).to(tl.int32) if ids_ptr is not None else 0
    tl.store(middle_ptr + 2, own_padded * PADDED + others_padded * OTHERS_PADDED)


@triton.jit
def _append(middle_ptr, starts, bits, seen, whole, num_masked, num_whole):
    """Store the entries of tiles, and return how many of each kind there are now."""
    # Count the tiles of both kinds up to each: from bit 16 on, the ones without a mask.
    masked = seen & ~whole
    counts = tl.where(whole, 1 << 16, masked.to(tl.int32))
    numbers = tl.cumsum(counts, 0)
    entry = starts + bits
    tl.store(middle_ptr - num_masked - (numbers & 0xFFFF), entry, mask=masked)
    tl.store(middle_ptr + HEADER - 1 + num_whole + (numbers >> 16), entry, mask=whole)
    total = tl.sum(counts, 0)
    return num_masked + (total & 0xFFFF), num_whole + (total >> 16)


@triton.jit
def _meeting_tiles(
    other_ids_ptr, starts, exists, size, least, low, high, OTHER: tl.constexpr
):  # fmt: skip
    """Return which tiles have ids of the rows, which the same single one, and which padding."""
    other_least, other_high, other_low = _bounds(
        other_ids_ptr, starts, exists, size, VISITED, OTHER
    )
    alike = (other_least == high) & (other_high == high) & (least == high) & (high >= 0)
    meets = (other_low <= high) & (other_high >= low)
    return meets, alike, tl.where(other_least < 0, PADDED, 0)


@triton.jit
def _own_bounds(rows_ptr, row, rows, exists, fill):
    """Return the least, the least nonnegative and the greatest number of the rows that exist."""
    least, low, greatest = 0, 0, 0
    if rows_ptr is not None:
        x = tl.load(rows_ptr + row + rows, mask=exists, other=LARGEST)
        least, low = tl.min(x, 0), tl.min(tl.where(x < 0, LARGEST, x), 0)
        greatest = tl.max(tl.where(exists, x, fill), 0)
    return least, low, greatest


@triton.jit
def _bounds(rows_ptr, starts, exists, size, fill, BLOCK: tl.constexpr):
    """Return each tile's least, greatest and least nonnegative number; past `size`, `fill`."""
    WIDTH: tl.constexpr = BLOCK if BLOCK < LANES else LANES
    least, greatest, low = 0, 0, 0
    for i in tl.static_range(BLOCK // WIDTH):
        row = starts[:, None] + (i * WIDTH + tl.arange(0, WIDTH))[None, :]
        x = tl.load(rows_ptr + row, mask=exists[:, None] & (row < size), other=fill)
        y = tl.where(x < 0, LARGEST, x)
        if i == 0:
            least, greatest, low = x, x, y
        else:
            least, greatest, low = tl.minimum(least, x), tl.maximum(greatest, x), tl.minimum(low, y)
    return tl.min(least, 1), tl.max(greatest, 1), tl.min(low, 1)


@triton.jit
def _tiles_in_ranges(
    ranges, row_other, starts, exists, size, first_key, last_key, BLOCK: tl.constexpr
):  # fmt: skip
    """Return in which tiles of queries a range shows some of the keys to a query, or all to all."""
    WIDTH: tl.constexpr = BLOCK if BLOCK < LANES else LANES
    in_part = tl.zeros([starts.shape[0], WIDTH], tl.int1)
    in_full = tl.full([starts.shape[0], WIDTH], 1, tl.int1)
    for i in tl.static_range(BLOCK // WIDTH):
        query = starts[:, None] + (i * WIDTH + tl.arange(0, WIDTH))[None, :]
        is_query = exists[:, None] & (query < size)
        all_keys = tl.zeros(query.shape, tl.int1)
        for n in tl.static_range(ranges.number):
            range_ptr = ranges.bounds + ((row_other + query) * ranges.number + n) * 2
            begin = tl.load(range_ptr, mask=is_query, other=0)
            end = tl.load(range_ptr + 1, mask=is_query, other=0)
            in_part |= (begin < end) & (begin < last_key) & (end > first_key)
            all_keys |= (begin <= first_key) & (end >= last_key)
        in_full &= all_keys
    return tl.max(in_part.to(tl.int32), 1) > 0, tl.min(in_full.to(tl.int32), 1) > 0


def listed_mask(
    kernel: str, operands: AttentionOperands[Tensor], spec: AttentionSpec, backend: Backend
) -> Mask:
    """Return an explicit kernel's mask, and launch what lists its tiles."""
    of_keys = kernel in ("flash_fwd", "flash_bwd_dq", "flash_jvp")
    offsets, segments, ends = offsets_of(operands), segments_of(operands), ends_of(operands)
    depths, ranges = depths_of(operands, spec), ranges_of(operands)
    tree, lists = None, None
    if ranges is not None and ranges.bounds.data_ptr() % 16 != 0:
        ranges = ranges._replace(bounds=ranges.bounds.clone())  # which kernels load together
    if spec.hides_by_data:
        config = config_of(kernel, spec, backend, operands.q.device)
        assert isinstance(config, FlashConfig)
        blocks = config.block_q, config.block_kv
        lists = allocate_lists(operands.q, spec, of_keys, *blocks)
        ids = (None, None) if segments is None else (segments.q, segments.kv)
        pairs = ids, depths or (None, None), offsets
        ids, both_depths, both_offsets = (x if of_keys else x[::-1] for x in pairs)
        tensors = (lists, *ids, ends, *both_depths, ranges, *both_offsets)
        launch("tile_lists", tile_lists_kernel, _prepare, tensors, spec, backend, of_keys, *blocks)
        segments = segments and Segments(segments.q, segments.kv, lists)
        tree = None if ends is None else Tree(ends, lists)
    if of_keys:
        kept, intervals = lists_of_keys(operands), intervals_of_keys(operands)
    else:
        kept, intervals = lists_of_queries(operands), intervals_of_queries(operands)
    return Mask(kept, offsets, segments, tree, depths, ranges, None, lists, intervals)


def allocate_lists(
    q: Tensor, spec: AttentionSpec, of_keys: bool, block_q: int, block_kv: int
) -> Tensor:
    return q.new_empty(_size(spec, of_keys, block_q, block_kv), dtype=torch.int32)


def _size(spec: AttentionSpec, of_keys: bool, block_q: int, block_kv: int) -> int:
    tiles, most = _num_tiles(spec, of_keys, block_q, block_kv)
    return 1 + tiles * (2 * most + HEADER.value)


def listed_argument(call: KernelCall, of_keys: bool) -> dict[str, Any]:
    """Return the mask as a kernel takes it, which has the tiles that its lists count."""
    mask, spec, config = call.layouts[-1], call.spec, call.config
    assert isinstance(spec, AttentionSpec)
    assert isinstance(config, FlashConfig)
    if mask.tiles is not None:
        size = _size(spec, of_keys, config.block_q, config.block_kv)
        assert mask.tiles.shape == (size,), f"lists of other tiles than {config} has"
    return mask_argument(call, of_keys)


def _num_tiles(spec: AttentionSpec, of_keys: bool, block_q: int, block_kv: int) -> tuple[int, int]:
    sides = [(spec.seq_q, block_q), (spec.seq_kv, block_kv)]
    stays, visited = sides if of_keys else reversed(sides)
    return spec.batch * num_sequence_tiles(spec, *stays), max(triton.cdiv(*visited), 1)


def _prepare(call: KernelCall) -> Prepared:
    assert isinstance(call.spec, AttentionSpec)
    numbers = dict(zip(("OF_KEYS", "BLOCK_Q", "BLOCK_KV"), call.constants, strict=True))
    tiles, _most = _num_tiles(call.spec, *call.constants)
    ranges = with_number(call.layouts[6], call.spec)
    return (tiles,), flash_arguments(call.spec) | numbers | {"ranges": ranges}
