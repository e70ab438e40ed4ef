"""Flash attention, forward, for SM90.

The same formula as `torch_attn.kernels.portable.flash_fwd`. What the compiler decides there is
written here: a warp that does nothing but load, warpgroups that do nothing but compute, what each
waits for, and which products run under which softmax. Shah et al. 2024, FlashAttention-3,
algorithms 1 and 2.
"""

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from torch_attn.kernels.explicit.barriers import (
    K_READ,
    MAX_STAGES,
    TURN,
    V_READ,
    allocate_barriers,
    arrive,
    barrier,
    wait_for_all,
)
from torch_attn.kernels.explicit.block_mask import kept_start, kept_tiles
from torch_attn.kernels.explicit.carry import (
    head_rows,
    keep_rows,
    load_carry,
    prefetch_carry,
    store_carry,
)
from torch_attn.kernels.explicit.hidden import hide_keys, load_keys, mark_queries
from torch_attn.kernels.explicit.intervals import load_windows
from torch_attn.kernels.explicit.items import (
    Others,
    Problem,
    Rows,
    allocate_hand_over,
    are_counted,
    are_listed,
    head_and_tile,
    item_counter,
    next_item,
    own_item,
    persistent,
    tiles_of_list,
)
from torch_attn.kernels.explicit.registers import join_columns, pack, split_columns, unpack
from torch_attn.kernels.explicit.softmax import add_columns, rescales_on_demand
from torch_attn.kernels.explicit.steps import step_has_padding, step_is_alike
from torch_attn.kernels.explicit.terms import (
    adds_terms,
    allocate_bias_boxes,
    bias_box_bytes,
    bias_boxes,
    head_terms,
    load_bias,
    load_bias_box,
    read_bias_box,
)
from torch_attn.kernels.explicit.tma import (
    allocate_tile,
    clear_padding,
    clear_rows,
    load_pieces,
    load_tile,
    maps_of,
    num_pieces,
    piece,
    store_result,
    stored_maps_of,
    tile_bytes,
)
from torch_attn.kernels.explicit.wgmma import (
    add_product,
    product_layout,
    product_scores,
    rescale,
    scale_rows,
    wait_product,
    wait_sums,
    zeros,
)
from torch_attn.kernels.explicit.wgmma_scores import (
    bounded_update,
    hide,
    rounding_of_one_key,
    scaled_scores,
    scores_with_terms,
    softmax_update,
)
from torch_attn.kernels.explicit.wgmma_terms import (
    add_to_products,
    draw_masks,
    drop_packed,
    shifted_softmax_update,
)
from torch_attn.kernels.library.mask import mask_argument
from torch_attn.kernels.library.sequences import rows_of_sequence
from torch_attn.kernels.library.softmax import LN2, LOG2E, add_sink, row_statistics
from torch_attn.kernels.library.terms import terms_argument, terms_of
from torch_attn.kernels.library.tiles import visible_tiles
from torch_attn.kernels.tile_lists import listed_mask
from torch_attn.launch import UNSPECIALIZED, KernelCall, Prepared, launch, rule_argument
from torch_attn.targets import num_sms
from twin_attention.contract.operands import AttentionOperands
from twin_attention.contract.spec import (
    AttentionSpec,
    BlockSparseSpec,
    PartialSpec,
    ScoreRule,
    VarlenSpec,
    Window,
)
from twin_attention.targets import sm90
from twin_attention.targets.family import Backend
from twin_attention.targets.kernels import SpecializedConfig
from twin_attention.targets.steps import steps_of_queries
from twin_attention.targets.target import SHARED_MEMORY_LIMIT

# Up to this head size the first product of the next item is issued ahead; above, that is slower.
AHEAD_HEAD_DIM = 96
# Steps of a dense problem's longest tile from which on uneven tiles come from a counter, by the
# largest head dimension.
COUNTED_STEPS = {128: 64, 256: 32}


class Results(NamedTuple):
    """Hold what the kernel writes.

    Attributes:
        out: in the kernel its descriptors, or in a tuple its pointer, see `stored_maps_of`.
        lse: [B, Hq, Sq] float32, natural logarithm.
        row_max: [B, Hq, Sq] float32, each row's largest score; or None.
        carry: [B, Sq, Hq, Dv] float32, the result over other keys whose lse is in `lse`; or None.
        place: where a tile of out is on its way to memory, a constant: "staged" in shared memory of
            its own; "in q", the queries', where there is no more; or "part", stored in float32 from
            registers, by its pointer.
    """

    out: Any
    lse: Any
    row_max: Any
    carry: Any
    place: Any = None


@gluon.jit(do_not_specialize=[*UNSPECIALIZED, "num_items"])
def flash_fwd_kernel(
    q,
    k,
    v,
    sinks_ptr,
    results,
    counter_ptr,
    terms,
    mask,
    seq_q,
    seq_kv,
    diagonal,
    num_sequences,
    heads_q,
    rule,
    window_left,
    window_right,
    num_items,
    together,
    GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    PING_PONG: gl.constexpr,
    EDGES: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """One program computes tiles of BLOCK_Q rows of query heads, one after the other.

    A producer warp loads with TMA; BLOCK_Q / 64 consumer warpgroups have 64 rows each, and take the
    registers that the producer does not need. A consumer issues q·kᵀ of the next tile of keys with
    p·v of the present one, and computes the softmax of the next while p·v runs; p is the left
    operand in the registers where it was computed. PING_PONG: the consumers issue in turn, so that
    the softmax of one runs under the products of another; at 2, only the first waits for tiles of
    keys and values in the main loop.

    q, k, v and out are TMA descriptors of [B, H, S, D], one for each column piece. Loop invariant,
    accumulation and the row that sees no key: as in the portable `flash_fwd_kernel`. A carry and
    lse are a result over other keys, which the keys join. The carry counts where lse is finite.
    Where out is the carry's memory, and without sinks, a tile without keys is passed over. A wide
    acc, see `rescales_on_demand`, has m_i at most RESCALE_ABOVE below the row maximum so far.

    A bias of pairs comes with the keys: a tile of it is part of their stage. What is dropped is
    drawn while the tile's products run.

    Args:
        results: `Results`.
        terms: `torch_attn.kernels.library.terms.Terms`.
        num_items: tiles of queries of all heads, one work item each.
        together: heads whose tiles follow each other by length, see `head_and_tile`.
        EDGES: some tile of keys needs a mask.
        mask: as in the portable kernel. Packed tensors are a batch of one, and out is a pointer.
        counter_ptr: [1], zero at first: the producer takes the items as they come, see `next_item`,
            and tells the consumers; None where programs take turns, and where tiles are listed.
        AHEAD: the first q·kᵀ of an item is issued with the last p·v of the item before, for which
            there are two tiles of queries in shared memory.
    """
    dtype: gl.constexpr = q[0].dtype
    OUT: gl.constexpr = results.place
    NUM_CONSUMERS: gl.constexpr = BLOCK_Q // 64
    gl.static_assert(NUM_STAGES <= MAX_STAGES)
    NUM_TILES_Q: gl.constexpr = (2 if AHEAD else 1) * NUM_CONSUMERS
    q_tile = allocate_tile(dtype, NUM_TILES_Q, 64, HEAD_DIM)
    k_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_KV, HEAD_DIM)
    v_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_KV, HEAD_DIM_V)
    out_tile = q_tile
    if OUT == "staged":
        out_tile = allocate_tile(dtype, NUM_CONSUMERS, 64, HEAD_DIM_V)
    bias_tile = q_tile
    if terms.bias.boxes is not None:
        bias_tile = allocate_bias_boxes(terms.bias.boxes, NUM_STAGES, BLOCK_Q, BLOCK_KV)
    q_full = allocate_barriers(NUM_TILES_Q)
    q_read = allocate_barriers(NUM_TILES_Q)
    k_full = allocate_barriers(NUM_STAGES)
    v_full = allocate_barriers(NUM_STAGES)
    fence_async_shared()

    tiles = (q_tile, k_tile, v_tile, out_tile, bias_tile)
    barriers = (q_full, q_read, k_full, v_full)
    shared, carried = (), ()
    if are_counted(num_sequences, mask.segments, mask.tree) or counter_ptr is not None:
        shared = allocate_hand_over(NUM_CONSUMERS, are_listed(mask.segments, mask.tree))
    if results.carry is not None:
        carried = (results.carry,)
    problem = Problem(
        seq_q, seq_kv, diagonal, heads_q, num_items, together, mask.offsets.q, mask.offsets.kv,
        num_sequences, mask.segments, mask.tree, mask.depths, mask.intervals,
    )  # fmt: skip
    # Constants stand in the calls: variables would make tensors of them. The last part loads.
    gl.warp_specialize(
        [
            (_consume, (
                tiles, barriers, shared, results, terms, problem, rule, window_left, window_right,
                sinks_ptr, mask.lists, part, BLOCK_Q, HEAD_DIM, HEAD_DIM_V, PING_PONG, EDGES,
                AHEAD, OUT,
            ))
            if part < NUM_CONSUMERS
            else (_produce, (
                tiles, barriers, shared, counter_ptr, (q, k, v), terms.bias, carried, problem,
                window_left, window_right, mask.lists, BLOCK_Q, GROUP_SIZE, HEAD_DIM, HEAD_DIM_V,
                sinks_ptr is None and OUT == "part" and results.carry is not None,
            ))
            for part in ((0, 1, 2) if NUM_CONSUMERS == 2 else (0, 1, 2, 3))
        ],
        [4, 1] if NUM_CONSUMERS == 2 else [4, 4, 1],
        [240, 24] if NUM_CONSUMERS == 2 else [160, 160, 24],
    )  # fmt: skip


@gluon.jit
def _locate(
    item,
    place,
    problem,
    window_left,
    window_right,
    lists,
    BLOCK_Q: gl.constexpr,
    BLOCK_KV: gl.constexpr,
):
    """Return batch, head, rows, keys and tiles of keys of a work item; `place` is packed rows'.

    The tiles of keys are what `visible_tiles` or `kept_tiles` returns; where nothing is visible,
    one masked tile, so that no consumer has to do without.
    """
    seq_q, seq_kv, diagonal = problem.size, problem.size_other, problem.diagonal
    first_kv = 0
    if problem.intervals is not None:
        index, _tile, start_q, begin, before, full, after = place
    elif problem.num_sequences is None and are_listed(problem.segments, problem.tree):
        index, tile, start_q = place.head, place.tile, place.start
    elif problem.num_sequences is None:
        num_tiles = gl.cdiv(seq_q, BLOCK_Q)
        index, tile = head_and_tile(item, problem.num_items, problem.together, num_tiles)
        start_q = (num_tiles - 1 - tile) * BLOCK_Q
        tile = num_tiles - 1 - tile
    else:
        index, tile, start_q, seq_q = place.head, place.tile, place.start, place.end
        first_kv, seq_kv = place.first_other, place.size_other
        diagonal = seq_kv - seq_q
    batch, head = index // problem.heads_q, index % problem.heads_q
    if are_listed(problem.segments, problem.tree):
        begin, before, full, after = tiles_of_list(problem, place, batch, BLOCK_Q, BLOCK_KV)
    elif problem.intervals is None:
        begin, before, full, after = visible_tiles(
            start_q, seq_q, seq_kv, diagonal, window_left, window_right, BLOCK_Q, BLOCK_KV
        )
    if lists is not None:
        begin, before, full, after = kept_tiles(
            lists, batch, head, start_q, (begin, before, full, after), window_left, window_right,
            BLOCK_KV,
        )  # fmt: skip
    before = gl.maximum(before, 1 - full - after)
    rows, keys = Rows(start_q, seq_q, diagonal), Others(first_kv, seq_kv)
    return batch, head, rows, keys, (begin, before, full, after)


@gluon.jit
def _produce(
    tiles,
    barriers,
    shared,
    counter_ptr,
    loads,
    bias,
    carried,
    problem,
    window_left,
    window_right,
    lists,
    BLOCK_Q: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    PASSES_OVER: gl.constexpr,
):
    """Load all that the consumers of a program multiply, one warp for all of them.

    PASSES_OVER: a tile that sees no key in its intervals has no work.
    """
    q_tile, k_tile, v_tile, _out_tile, bias_tile = tiles
    q_full, q_read, k_full, v_full = barriers
    q, k, v = loads
    NUM_CONSUMERS: gl.constexpr = BLOCK_Q // 64
    NUM_TILES_Q: gl.constexpr = q_tile[0].shape[0]
    NUM_STAGES: gl.constexpr = k_tile[0].shape[0]
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    READERS: gl.constexpr = 128 * NUM_CONSUMERS + 32
    HAS_LISTS: gl.constexpr = are_listed(problem.segments, problem.tree)
    step = 0  # over all items
    turn = 0
    item, place = next_item(
        turn, problem, shared, counter_ptr, BLOCK_Q, True, (), problem.heads_q, BLOCK_KV,
        PASSES_OVER,
    )  # fmt: skip
    while item < problem.num_items:
        batch, head, rows, keys, visible = _locate(
            item, place, problem, window_left, window_right, lists, BLOCK_Q, BLOCK_KV
        )
        _begin, before, full, after = visible
        head_kv = head // GROUP_SIZE
        total = before + full + after
        if len(carried) > 0:
            first = head_rows(
                carried[0], batch, rows.end, rows.start, head, problem.heads_q, HEAD_DIM_V
            )
            prefetch_carry(first, rows.end - rows.start, problem.heads_q, BLOCK_Q, HEAD_DIM_V)
        for i in range(total + 1):
            # Keys go one tile ahead of values, which is the order of use.
            if i < total:
                slot = step % NUM_STAGES
                if HAS_LISTS:
                    # Loaded while the tile is still read.
                    start = kept_start(lists, batch, head, rows.start, i, visible, BLOCK_KV)
                if step >= NUM_STAGES:
                    wait_for_all(K_READ + slot, READERS)
                row = keys.first
                if HAS_LISTS:
                    row += start
                else:
                    row += kept_start(lists, batch, head, rows.start, i, visible, BLOCK_KV)
                if bias.boxes is not None:
                    ready = k_full.index(slot)
                    bias_bytes: gl.constexpr = bias_box_bytes(bias.boxes, BLOCK_Q, BLOCK_KV)
                    mbarrier.expect(ready, bias_bytes + tile_bytes(BLOCK_KV, HEAD_DIM))
                    load_bias_box(bias, bias_tile, slot, batch, head, rows.start, row, ready)
                    load_pieces(k, k_tile, slot, batch, head_kv, row, ready, HEAD_DIM)
                else:
                    load_tile(k, k_tile, slot, batch, head_kv, row, k_full.index(slot), HEAD_DIM)
            if i == 0:
                phase = turn * NUM_CONSUMERS // NUM_TILES_Q & 1
                for consumer in gl.static_range(NUM_CONSUMERS):
                    slot = (turn * NUM_CONSUMERS + consumer) % NUM_TILES_Q
                    mbarrier.wait(q_read.index(slot), phase ^ 1)
                    load_tile(
                        q, q_tile, slot, batch, head, rows.start + consumer * 64,
                        q_full.index(slot), HEAD_DIM,
                    )  # fmt: skip
            else:
                slot = (step - 1) % NUM_STAGES
                if step > NUM_STAGES:
                    wait_for_all(V_READ + slot, READERS)
                row = keys.first
                row += kept_start(lists, batch, head, rows.start, i - 1, visible, BLOCK_KV)
                load_tile(v, v_tile, slot, batch, head_kv, row, v_full.index(slot), HEAD_DIM_V)
            step += 1
        step -= 1
        turn += 1
        item, place = next_item(
            turn,
            problem,
            shared,
            counter_ptr,
            BLOCK_Q,
            True,
            (),
            problem.heads_q,
            BLOCK_KV,
            PASSES_OVER,
        )


@gluon.jit
def _consume(
    tiles,
    barriers,
    shared,
    results,
    terms,
    problem,
    rule,
    window_left,
    window_right,
    sinks_ptr,
    lists,
    CONSUMER: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    PING_PONG: gl.constexpr,
    EDGES: gl.constexpr,
    AHEAD: gl.constexpr,
    OUT: gl.constexpr,
):
    """Compute 64 rows of each of a program's work items."""
    q_tile, k_tile, v_tile, out_tile, bias_tile = tiles
    q_full, q_read, k_full, v_full = barriers
    # The keys are some of all, and join a result over others where there is one.
    IS_PART: gl.constexpr = problem.intervals is not None
    JOINS: gl.constexpr = results.carry is not None
    OUT_IN_Q: gl.constexpr = OUT == "in q"
    NUM_CONSUMERS: gl.constexpr = BLOCK_Q // 64
    NUM_TILES_Q: gl.constexpr = q_tile[0].shape[0]
    NUM_STAGES: gl.constexpr = k_tile[0].shape[0]
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    READERS: gl.constexpr = 128 * NUM_CONSUMERS + 32
    NEXT: gl.constexpr = (CONSUMER + 1) % NUM_CONSUMERS
    ADDS: gl.constexpr = adds_terms(terms.bias.entries, terms.relative, terms.slopes)
    HAS_BOXES: gl.constexpr = terms.bias.boxes is not None
    DROPS: gl.constexpr = terms.seed is not None
    # The main loop's turn comes from the first consumer, which has waited for the same tiles.
    LOADS_AWAITED: gl.constexpr = PING_PONG < 2 or CONSUMER == 0 or HAS_BOXES
    dtype: gl.constexpr = q_tile[0].dtype
    layout: gl.constexpr = product_layout(BLOCK_KV)
    of_row: gl.constexpr = gl.SliceLayout(1, layout)
    HAS_LISTS: gl.constexpr = are_listed(problem.segments, problem.tree)
    IS_PLAIN: gl.constexpr = not (HAS_LISTS or IS_PART)  # a row that sees one key is known
    # Capped, scores need no maximum in a dtype with the range of float32: m_i stays 0.
    ASKS: gl.constexpr = ADDS or DROPS or results.row_max is not None
    BOUNDED: gl.constexpr = rule.small_cap and dtype == gl.bfloat16 and IS_PLAIN and not ASKS
    # Where a row's largest score is asked for, it is m_i.
    ON_DEMAND: gl.constexpr = rescales_on_demand(HEAD_DIM_V) and results.row_max is None
    # A row's largest score is without the sink, which joins at the end.
    SINK_LAST: gl.constexpr = BOUNDED or results.row_max is not None
    step = 0  # over all items
    turn = 0
    if PING_PONG and CONSUMER == NUM_CONSUMERS - 1:
        arrive(TURN, 256)
    item, place = own_item(turn, problem, shared, CONSUMER)
    q_slot = CONSUMER
    if AHEAD:
        # Only a program that takes items from a counter may have none.
        exists = len(shared) == 0 or item < problem.num_items
        if exists:
            mbarrier.wait(q_full.index(CONSUMER), 0)
            mbarrier.wait(k_full.index(0), 0)
        s = product_scores(q_tile, CONSUMER, k_tile, 0, HEAD_DIM, layout)
        s = warpgroup_mma_wait(0, deps=(s,))
        if exists:
            arrive(K_READ, READERS)
    while item < problem.num_items:
        batch, head, positions, keys, visible = _locate(
            item, place, problem, window_left, window_right, lists, BLOCK_Q, BLOCK_KV
        )
        start_q, seq_q, diagonal = positions
        first_kv, seq_kv = keys
        begin, before, full, after = visible
        first_row = start_q + CONSUMER * 64
        rows = first_row + gl.arange(0, 64, of_row)
        position, reach_left, reach_right = rows + diagonal, window_left, window_right
        row_q = batch.to(gl.int64) * problem.size
        row_kv = batch.to(gl.int64) * problem.size_other + first_kv
        marks = mark_queries(problem, row_q, row_kv, rows, seq_q)
        if IS_PART:
            position, reach_right = load_windows(problem.intervals, rows, seq_q)
            reach_left = 0
        m_i, l_i, acc, has_carry = _start_rows(
            results, problem, batch, head, first_row, rows, seq_q, sinks_ptr, BLOCK_KV, HEAD_DIM_V,
            BOUNDED, SINK_LAST,
        )  # fmt: skip

        # The first tile of keys
        own, offset, bias = 0, 0, 0
        if ADDS or DROPS:
            own, own_q = _own_terms(terms, batch, head, first_row, problem, place)
            start_kv = kept_start(lists, batch, head, start_q, 0, visible, BLOCK_KV)
            offset = start_kv - first_row - diagonal
            bias, kept = _terms_of_tile(
                terms, own, own_q, first_row, start_kv, seq_q, seq_kv, BLOCK_KV, layout, not EDGES
            )
        if HAS_LISTS:
            start_kv = kept_start(lists, batch, head, start_q, 0, visible, BLOCK_KV)
            alike = step_is_alike(0, begin, before, problem.segments)
            of_keys = load_keys(problem, marks, start_kv, seq_kv, BLOCK_KV, layout, alike)
        if not AHEAD:
            slot = step % NUM_STAGES
            mbarrier.wait(q_full.index(CONSUMER), turn & 1)
            mbarrier.wait(k_full.index(slot), step // NUM_STAGES & 1)
            s = product_scores(q_tile, CONSUMER, k_tile, slot, HEAD_DIM, layout)
            s = warpgroup_mma_wait(0, deps=(s,))
            if HAS_BOXES:
                bias = read_bias_box(piece(bias_tile, slot).slice(64 * CONSUMER, 64, dim=0), layout)
            arrive(K_READ + slot, READERS)
        s, shift = _add_terms(s, terms, own, rule, offset, bias, EDGES)
        if EDGES:
            start_kv = kept_start(lists, batch, head, start_q, 0, visible, BLOCK_KV)
            s = hide(s, position, start_kv, seq_kv, reach_left, reach_right)
            if HAS_LISTS:
                s = hide_keys(s, problem, marks, position, of_keys)
        if BOUNDED:
            packed, l_i = bounded_update(s, l_i, rule, EDGES)
        else:
            e, alpha, m_i, l_i = _update(s, shift, m_i, l_i, rule, EDGES, ADDS, ON_DEMAND)
            if JOINS:
                # No product runs. ptxas would move the scaling of acc into the next ones.
                acc = wait_sums(scale_rows(keep_rows(acc, has_carry), alpha), 0)
            packed = pack(e, dtype)
            if DROPS:
                packed = drop_packed(packed, kept)
        if EDGES:
            _clear_values(v_tile, v_full, step, problem, marks, 0, begin, before, seq_kv, start_kv)

        # Visit the other tiles of keys that these queries see; only tiles at the edges are masked.
        index = 1
        step += 1
        for masked in gl.static_range(1 if EDGES else 0, -1, -1):
            end = before + after if masked else before + full + after
            while index < end:
                slot = step % NUM_STAGES
                previous = (step - 1) % NUM_STAGES
                # s = scale · q kᵀ, and acc += p v for the tile before
                if LOADS_AWAITED:
                    mbarrier.wait(k_full.index(slot), step // NUM_STAGES & 1)
                if PING_PONG:
                    wait_for_all(TURN + CONSUMER, 256)
                s = product_scores(q_tile, q_slot, k_tile, slot, HEAD_DIM, layout)
                if LOADS_AWAITED:
                    mbarrier.wait(v_full.index(previous), (step - 1) // NUM_STAGES & 1)
                p = unpack(packed, dtype, layout, "edge" if masked else "full")
                acc = add_product(acc, p, v_tile, previous)
                if PING_PONG:
                    arrive(TURN + NEXT, 256)
                if ADDS or DROPS:
                    start_kv = kept_start(lists, batch, head, start_q, index, visible, BLOCK_KV)
                    offset = start_kv - first_row - diagonal
                    bias, kept = _terms_of_tile(
                        terms, own, own_q, first_row, start_kv, seq_q, seq_kv, BLOCK_KV, layout,
                        not masked,
                    )  # fmt: skip
                if HAS_BOXES:
                    bias = read_bias_box(
                        piece(bias_tile, slot).slice(64 * CONSUMER, 64, dim=0), layout
                    )
                if DROPS:
                    s, kept = warpgroup_mma_wait(num_pieces(HEAD_DIM_V), deps=(s, kept))
                else:
                    s = warpgroup_mma_wait(num_pieces(HEAD_DIM_V), deps=(s,))
                arrive(K_READ + slot, READERS)
                # p = exp(s - max)
                s, shift = _add_terms(s, terms, own, rule, offset, bias, masked)
                if masked:
                    start_kv = kept_start(lists, batch, head, start_q, index, visible, BLOCK_KV)
                    s = hide(s, position, start_kv, seq_kv, reach_left, reach_right)
                    if HAS_LISTS:
                        alike = step_is_alike(index, begin, before, problem.segments)
                        of_keys = load_keys(
                            problem, marks, start_kv, seq_kv, BLOCK_KV, layout, alike
                        )
                        s = hide_keys(s, problem, marks, position, of_keys)
                if BOUNDED:
                    # Without a maximum each half goes by itself, and the second takes the registers
                    # of the p that was multiplied.
                    left, right = split_columns(s)
                    left, l_i = bounded_update(left, l_i, rule, masked)
                    acc, p = wait_product(acc, p)
                    arrive(V_READ + previous, READERS)
                    right, l_i = bounded_update(right, l_i, rule, masked)
                    packed = join_columns(left, right, packed)
                else:
                    e, alpha, m_i, l_i = _update(s, shift, m_i, l_i, rule, masked, ADDS, ON_DEMAND)
                    # Rescale what was accumulated
                    acc, p = wait_product(acc, p)
                    arrive(V_READ + previous, READERS)
                    acc = rescale(acc, alpha, ON_DEMAND)
                    packed = pack(e, dtype)
                    if DROPS:
                        packed = drop_packed(packed, kept)
                if masked:
                    _clear_values(
                        v_tile, v_full, step, problem, marks, index, begin, before, seq_kv, start_kv
                    )
                index += 1
                step += 1
        if not OUT_IN_Q:
            mbarrier.arrive(q_read.index(q_slot), count=1)

        # The last p·v, and q·kᵀ of the next item: of nothing and not looked at if there is none.
        turn += 1
        item, place = own_item(turn, problem, shared, CONSUMER)
        previous = (step - 1) % NUM_STAGES
        if AHEAD:
            slot = step % NUM_STAGES
            q_slot = (turn * NUM_CONSUMERS + CONSUMER) % NUM_TILES_Q
            if item < problem.num_items:
                mbarrier.wait(q_full.index(q_slot), turn * NUM_CONSUMERS // NUM_TILES_Q & 1)
                mbarrier.wait(k_full.index(slot), step // NUM_STAGES & 1)
            if PING_PONG:
                wait_for_all(TURN + CONSUMER, 256)
            s = product_scores(q_tile, q_slot, k_tile, slot, HEAD_DIM, layout)
        mbarrier.wait(v_full.index(previous), (step - 1) // NUM_STAGES & 1)
        p = unpack(packed, dtype, layout, "last")
        acc = add_product(acc, p, v_tile, previous)
        if AHEAD:
            if PING_PONG:
                arrive(TURN + NEXT, 256)
            s = warpgroup_mma_wait(num_pieces(HEAD_DIM_V), deps=(s,))
            if item < problem.num_items:
                arrive(K_READ + slot, READERS)
        # Add the row sums of each quad.
        l_i = gl.convert_layout(gl.sum(l_i, 1), of_row)
        factor = 1.0
        if BOUNDED:
            m_i = gl.where(l_i == 0.0, float("-inf"), m_i)
            factor = rounding_of_one_key(l_i, position, seq_kv, reach_left, reach_right, dtype)
        factor, l_safe = _store_statistics(
            results, problem, batch, head, rows, seq_q, sinks_ptr, terms, m_i, l_i, factor,
            SINK_LAST,
        )  # fmt: skip
        acc, p = wait_product(acc, p)
        arrive(V_READ + previous, READERS)
        acc = scale_rows(acc, factor / l_safe)
        _store_out(
            results, out_tile, acc, problem, batch, head, start_q, rows, seq_q, CONSUMER, OUT,
            HEAD_DIM_V,
        )  # fmt: skip
        if OUT_IN_Q:
            tma.store_wait(0)
            mbarrier.arrive(q_read.index(CONSUMER), count=1)
    tma.store_wait(0)


@gluon.jit
def _start_rows(
    results,
    problem,
    batch,
    head,
    first_row,
    rows,
    seq_q,
    sinks_ptr,
    BLOCK_KV: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BOUNDED: gl.constexpr,
    SINK_LAST: gl.constexpr,
):
    """Return m_i, l_i and acc of rows before their first tile of keys, and which rows have a carry.

    A row with a carry starts from it. Without carries the last is 0.
    """
    layout: gl.constexpr = product_layout(BLOCK_KV)
    m_i = gl.full([64], 0.0 if BOUNDED else float("-inf"), gl.float32, rows.type.layout)
    l_i = add_columns(gl.zeros([64, BLOCK_KV], gl.float32, layout))
    if sinks_ptr is not None and not SINK_LAST:
        # The maximum has the sink from the start: acc is not rescaled for it at the end.
        m_i = gl.maximum(m_i, gl.load(sinks_ptr + head) * LOG2E)
    has_carry = 0
    if results.carry is not None:
        m_i, l_i, acc, has_carry = _load_part(
            results, problem, batch, head, first_row, rows, seq_q, m_i, l_i, HEAD_DIM_V
        )
    else:
        acc = zeros(64, HEAD_DIM_V)
    return m_i, l_i, acc, has_carry


@gluon.jit
def _terms_of_tile(
    terms,
    own,
    own_q,
    first_row,
    start_kv,
    seq_q,
    seq_kv,
    BLOCK_KV: gl.constexpr,
    LAYOUT: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """Return a tile's bias, unless TMA loads it, and what dropout keeps; 0 for what there is not.

    WHOLE: as `load_bias` takes it.
    """
    bias = 0
    if terms.bias.entries is not None and terms.bias.boxes is None:
        bias = load_bias(
            terms, own, first_row, start_kv, seq_q, seq_kv, 64, BLOCK_KV, LAYOUT, WHOLE=WHOLE
        )
    return bias, draw_masks(terms, own, own_q, start_kv, 64, BLOCK_KV, LAYOUT)


@gluon.jit
def _add_terms(s, terms, own, rule, offset, bias, MASKED: gl.constexpr):
    """Add terms to products q·k; returns these, and the shifts of scores in base 2, 0 without one.

    Where the exponent scales, terms join products that are not scaled yet. Otherwise scores are
    returned, as they are without terms where they will be MASKED.
    """
    ADDS: gl.constexpr = adds_terms(terms.bias.entries, terms.relative, terms.slopes)
    shift = 0
    if ADDS and not rule.scale_first:
        s, shift = add_to_products(s, terms, own, rule, offset, bias)
    elif ADDS:
        s = scores_with_terms(s, terms, own, rule, offset, bias)
    elif MASKED:
        s = scaled_scores(s, rule)
    return s, shift


@gluon.jit
def _update(
    s,
    shift,
    m_i,
    l_i,
    rule,
    MASKED: gl.constexpr,
    ADDS: gl.constexpr,
    ON_DEMAND: gl.constexpr,
):
    """Update the running softmax of what `_add_terms` returns; ADDS: there are terms."""
    if ADDS and not rule.scale_first:
        e, alpha, m_i, l_i = shifted_softmax_update(s, shift, m_i, l_i, rule.exp2_scale)
    else:
        e, alpha, m_i, l_i = softmax_update(s, m_i, l_i, rule, MASKED or ADDS, ON_DEMAND)
    return e, alpha, m_i, l_i


@gluon.jit
def _load_part(
    results, problem, batch, head, first_row, rows, seq_q, m_i, l_i, HEAD_DIM_V: gl.constexpr
):  # fmt: skip
    """Start rows from a result over other keys; returns m_i, l_i, acc and which rows have one."""
    carried = results.lse + (batch * problem.heads_q + head).to(gl.int64) * seq_q + rows
    m_carry = gl.load(carried, mask=rows < seq_q, other=float("-inf"))
    has_carry = m_carry != float("-inf")
    carried = head_rows(results.carry, batch, seq_q, first_row, head, problem.heads_q, HEAD_DIM_V)
    # All of them are read, so that the loads do not wait for lse.
    acc = load_carry(carried, rows < seq_q, problem.heads_q, HEAD_DIM_V)
    m_i = gl.maximum(m_i, m_carry * LOG2E)
    quarter = gl.where(has_carry, 0.25, 0.0)  # of each of a row's four sums
    of_sums: gl.constexpr = gl.SliceLayout(1, l_i.type.layout)
    l_i += gl.convert_layout(quarter, of_sums, assert_trivial=True)[:, None]
    return m_i, l_i, acc, has_carry


@gluon.jit
def _store_statistics(
    results,
    problem,
    batch,
    head,
    rows,
    seq_q,
    sinks_ptr,
    terms,
    m_i,
    l_i,
    factor,
    SINK_LAST: gl.constexpr,
):
    """Store what rows have beside out; returns what acc is multiplied by, and divided by.

    Args:
        factor: what acc is to be multiplied by anyway.
        SINK_LAST: acc does not know of the sink's maximum.
    """
    row_max = m_i
    if sinks_ptr is not None:
        alpha, m_i, l_i = add_sink(gl.load(sinks_ptr + head), m_i, l_i)
        if SINK_LAST:
            factor = factor * alpha
    if terms.seed is not None:
        factor = factor * terms.dropout.scale
    l_safe, lse = row_statistics(m_i, l_i)
    lse_row = (batch * problem.heads_q + head).to(gl.int64) * problem.size
    gl.store(results.lse + lse_row + rows, lse, mask=rows < seq_q)
    if results.row_max is not None:
        gl.store(results.row_max + lse_row + rows, row_max * LN2, mask=rows < seq_q)
    return factor, l_safe


@gluon.jit
def _store_out(
    results,
    out_tile,
    acc,
    problem,
    batch,
    head,
    start_q,
    rows,
    seq_q,
    CONSUMER: gl.constexpr,
    OUT: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
):
    """Store a consumer's rows, or start to."""
    if OUT == "part":
        carried = head_rows(
            results.out[0], batch, seq_q, start_q + CONSUMER * 64, head, problem.heads_q, HEAD_DIM_V
        )
        store_carry(carried, acc, rows < seq_q, problem.heads_q, HEAD_DIM_V)
    else:
        if OUT != "in q":
            tma.store_wait(0)
            barrier()
        store_result(
            results.out, out_tile, CONSUMER, acc, batch, head, start_q, seq_q, problem.heads_q,
            problem.num_sequences is not None, HEAD_DIM_V,
        )  # fmt: skip


@gluon.jit
def _own_terms(terms, batch, head, first_row, problem, place):
    """Return the `HeadTerms` of a consumer's rows, and the first row as dropout counts it."""
    element, own_q = batch, first_row
    if problem.num_sequences is not None:
        element = place.sequence
        first, _size = rows_of_sequence(
            problem.offsets, element, problem.size, problem.num_sequences, problem.size
        )
        own_q = first_row - first
    return head_terms(terms, element, head), own_q


@gluon.jit
def _clear_values(
    v_tile,
    v_full,
    step,
    problem,
    marks,
    index,
    begin,
    before,
    seq_kv,
    start_kv,
):
    """Clear what a tile of values has of other sequences, and of padding, once it is there."""
    NUM_STAGES: gl.constexpr = v_tile[0].shape[0]
    if problem.num_sequences is not None:
        slot = step % NUM_STAGES
        clear_rows(v_tile, slot, seq_kv - start_kv, v_full.index(slot), step // NUM_STAGES & 1)
    if problem.segments is not None:
        slot = step % NUM_STAGES
        padded = step_has_padding(index, begin, before)
        clear_padding(
            v_tile, slot, marks.other_ids, start_kv, seq_kv, padded, v_full.index(slot),
            step // NUM_STAGES & 1,
        )  # fmt: skip


def flash_fwd(
    operands: AttentionOperands[Tensor], spec: AttentionSpec, backend: Backend
) -> tuple[Tensor, ...]:
    """Launch `flash_fwd_kernel`.

    Returns:
        out [B, Sq, Hq, Dv] in q's dtype, lse [B, Hq, Sq] float32 and, where the problem asks for
        it, each row's largest score, as lse; all contiguous, without B for packed sequences.
    """
    q = operands.q
    out = q.new_empty((*q.shape[:-1], spec.head_dim_v))
    lse = q.new_empty((*q.shape[:-3], spec.heads_q, spec.seq_q), dtype=torch.float32)
    row_max = lse.new_empty(lse.shape) if spec.row_max else None
    launch_forward(operands, Results(out, lse, row_max, None), spec, backend)
    return (out, lse) if row_max is None else (out, lse, row_max)


def launch_forward(
    operands: AttentionOperands[Tensor],
    results: Results,
    spec: AttentionSpec,
    backend: Backend,
) -> None:
    """Launch `flash_fwd_kernel` on given outputs."""
    q = operands.q
    counter = item_counter(q, spec, _is_counted(spec, backend, q.device))
    tensors = (q, operands.k, operands.v, operands.sinks, results, counter)
    mask = listed_mask("flash_fwd", operands, spec, backend)
    tensors = (*tensors, terms_of(operands, spec), mask)
    # Four warps are one consumer; Triton adds those of the other parts.
    launch("flash_fwd", flash_fwd_kernel, _prepare, tensors, spec, backend, num_warps=4)


def _prepare(call: KernelCall) -> Prepared:
    """Return grid and arguments of `flash_fwd_kernel`."""
    spec, config = call.spec, call.config
    assert isinstance(spec, AttentionSpec)
    assert isinstance(config, SpecializedConfig)
    q, k, v, _sinks, results, counter, *_ = call.layouts
    steps = steps_of_queries(spec, config.block_q, config.block_kv)
    terms = terms_argument(call)["terms"]
    boxes = bias_boxes(terms.bias, config.block_q, config.block_kv)
    size_of_bias = 0
    if boxes is not None:
        tile = config.block_q * config.block_kv * terms.bias.entries.dtype.itemsize
        size_of_bias = config.num_stages * tile
        if not _room_for(spec, config, 1, size_of_bias, out_in_q=_columns_agree(spec)):
            boxes, size_of_bias = None, 0
    arguments = {
        "rule": rule_argument(_rule_of(spec)),
        "q": maps_of(q, 64),
        "k": maps_of(k, config.block_kv),
        "v": maps_of(v, config.block_kv),
        "results": results._replace(
            out=stored_maps_of(spec, results.out, 64),
            place=tl.constexpr(_place_of_out(spec, config, size_of_bias)),
        ),
        "terms": terms._replace(bias=terms.bias._replace(boxes=boxes)),
        # A list may be empty, and the one tile that is visited for it hides all.
        "EDGES": isinstance(spec, VarlenSpec | BlockSparseSpec | PartialSpec)
        or spec.segmented
        or spec.tree
        or spec.window != Window()
        or spec.seq_kv % config.block_kv != 0,
        # A consumer reads a tile of the bias when it has the item's rows.
        "AHEAD": max(spec.head_dim, spec.head_dim_v) <= AHEAD_HEAD_DIM
        and boxes is None
        and _room_for(spec, config, 2),
    }
    arguments |= mask_argument(call, of_keys=True)
    return persistent(call, steps, spec.heads_q * spec.batch, arguments, counter is not None)


def _is_counted(spec: AttentionSpec, backend: Backend, device: torch.device) -> bool:
    """Return True where programs take uneven tiles of a dense problem from a counter.

    Handing over an item takes time, which is little beside that of a long tile.
    """
    config = backend.configs(spec)["flash_fwd"]
    steps = steps_of_queries(spec, config.block_q, config.block_kv)
    items = len(steps) * spec.heads_q * spec.batch
    size = max(spec.head_dim, spec.head_dim_v)
    least = next(count for largest, count in COUNTED_STEPS.items() if size <= largest)
    return max(steps) >= least and items > num_sms(device, backend.target)


def _rule_of(spec: AttentionSpec) -> ScoreRule:
    """Return the way from q·k to the exponent, which scales where terms can be divided by that."""
    divides = 2.0**-60 <= spec.scale <= 2.0**60
    scale_first = bool(spec.terms) and not divides
    return ScoreRule.of(spec.scale, spec.softcap, scale_first, spec.precision)


def _room_for(
    spec: AttentionSpec,
    config: SpecializedConfig,
    tiles_q: int,
    size_of_bias: int = 0,
    out_in_q: bool = False,
) -> bool:
    """Return True if shared memory has room for tiles of queries beside all others."""
    columns, columns_v = (sum(sm90.column_pieces(d)) for d in (spec.head_dim, spec.head_dim_v))
    keys = config.num_stages * config.block_kv
    rows = keys + tiles_q * config.block_q
    rows_v = keys + (0 if out_in_q else config.block_q)
    size = 2 * (columns * rows + columns_v * rows_v) + size_of_bias + 1024
    return size <= SHARED_MEMORY_LIMIT["sm90"]


def _columns_agree(spec: AttentionSpec) -> bool:
    """Return True if a tile of the output may lie where one of the queries was."""
    columns, columns_v = (sum(sm90.column_pieces(d)) for d in (spec.head_dim, spec.head_dim_v))
    return columns == columns_v


def _place_of_out(spec: AttentionSpec, config: SpecializedConfig, size_of_bias: int) -> str:
    """Return the place of `Results`."""
    if isinstance(spec, PartialSpec) and not spec.last:
        return "part"
    staged = not _columns_agree(spec) or _room_for(spec, config, 1, size_of_bias)
    return "staged" if staged else "in q"
