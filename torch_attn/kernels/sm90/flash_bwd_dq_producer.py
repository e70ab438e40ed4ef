"""The producer warp of dq's kernel in the SM90 backward."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_attn.kernels.explicit.barriers import K_READ, READERS, V_READ, wait_for_all
from torch_attn.kernels.explicit.items import (
    Others,
    Rows,
    are_listed,
    head_and_tile,
    next_item,
    tiles_of_list,
)
from torch_attn.kernels.explicit.steps import step_start
from torch_attn.kernels.explicit.tma import load_tile
from torch_attn.kernels.library.tiles import visible_tiles


@gluon.jit
def locate_queries(item, place, problem, window_left, window_right, BLOCK_KV: gl.constexpr):
    """Return batch, head, rows, keys, shift, rows to read and tiles of keys of a work item.

    `place`: of `next_item`. shift: how far the rows of lse2 and delta are from the queries. In
    padding no rows of q and dout are read. The tiles of keys are those of `visible_tiles`; where
    nothing is visible there is one masked tile, so that each consumer has one.
    """
    seq_q, seq_kv, diagonal = problem.size, problem.size_other, problem.diagonal
    first_kv, shift, read_rows = 0, 0, 64
    if problem.intervals is not None:
        index, _tile, start_q, begin, before, full, after = place
    elif problem.num_sequences is None and are_listed(problem.segments, problem.tree):
        index, tile, start_q = place.head, place.tile, place.start
    elif problem.num_sequences is None:
        num_tiles = gl.cdiv(seq_q, 128)
        index, tile = head_and_tile(item, problem.num_items, problem.together, num_tiles)
        tile = num_tiles - 1 - tile
        start_q = tile * 128
    else:
        index, tile, start_q, seq_q = place.head, place.tile, place.start, place.end
        first_kv, seq_kv, sequence = place.first_other, place.size_other, place.sequence
        diagonal = seq_kv - seq_q
        shift = tile * 128 - start_q
        read_rows = gl.where(sequence < problem.num_sequences, 64, 0)
    if are_listed(problem.segments, problem.tree):
        begin, before, full, after = tiles_of_list(
            problem, place, index // problem.heads_q, 128, BLOCK_KV
        )
    elif problem.intervals is None:
        begin, before, full, after = visible_tiles(
            start_q, seq_q, seq_kv, diagonal, window_left, window_right, 128, BLOCK_KV
        )
    before = gl.maximum(before, 1 - full - after)
    batch, head = index // problem.heads_q, index % problem.heads_q
    rows, keys = Rows(start_q, seq_q, diagonal), Others(first_kv, seq_kv)
    return batch, head, rows, keys, shift, read_rows, (begin, before, full, after)


@gluon.jit
def produce_keys(
    tiles,
    barriers,
    shared,
    counter_ptr,
    row_ptrs,
    of_queries,
    of_keys,
    problem,
    window_left,
    window_right,
    GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
):
    """Load all tiles that the consumers of dq multiply."""
    q_tile, do_tile, out_tile, k_tile, v_tile = tiles
    q_full, do_full, out_full, q_read, k_full, v_full = barriers
    q, dout, out = of_queries
    k, v = of_keys
    Q_STAGES: gl.constexpr = q_tile[0].shape[0] // 2
    NUM_STAGES: gl.constexpr = k_tile[0].shape[0]
    V_STAGES: gl.constexpr = v_tile[0].shape[0]
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    step = 0  # counted over all items
    turn = 0
    item, place = next_item(
        turn, problem, shared, counter_ptr, 128, True, row_ptrs, (), problem.heads_q, BLOCK_KV, True
    )
    while item < problem.num_items:
        batch, head, rows, keys, _shift, _read_rows, visible = locate_queries(
            item, place, problem, window_left, window_right, BLOCK_KV
        )
        begin, before, full, after = visible
        head_kv = head // GROUP_SIZE
        for i in range(before + full + after):
            slot = step % NUM_STAGES
            row = keys.first + step_start(i, begin, before, full, after, BLOCK_KV)
            if step >= NUM_STAGES:
                wait_for_all(K_READ + slot, READERS)
            load_tile(k, k_tile, slot, batch, head_kv, row, k_full.index(slot), HEAD_DIM)
            if i == 0:
                for consumer in gl.static_range(2):
                    first = rows.start + consumer * 64
                    slot = turn % Q_STAGES * 2 + consumer
                    mbarrier.wait(q_read.index(slot), (turn // Q_STAGES & 1) ^ 1)
                    load_tile(q, q_tile, slot, batch, head, first, q_full.index(slot), HEAD_DIM)
                    load_tile(
                        dout, do_tile, slot, batch, head, first, do_full.index(slot), HEAD_DIM_V
                    )
                    if len(out_tile) > 0:
                        load_tile(
                            out, out_tile, slot, batch, head, first, out_full.index(slot),
                            HEAD_DIM_V,
                        )  # fmt: skip
            slot = step % V_STAGES
            if step >= V_STAGES:
                wait_for_all(V_READ + slot, READERS)
            load_tile(v, v_tile, slot, batch, head_kv, row, v_full.index(slot), HEAD_DIM_V)
            step += 1
        turn += 1
        item, place = next_item(
            turn, problem, shared, counter_ptr, 128, True, row_ptrs, (), problem.heads_q, BLOCK_KV,
            True,
        )  # fmt: skip
