"""The producer warp of the SM90 forward."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_attn.kernels.explicit.barriers import K_READ, V_READ, wait_for_all
from torch_attn.kernels.explicit.block_mask import kept_start
from torch_attn.kernels.explicit.carry import head_rows, prefetch_carry
from torch_attn.kernels.explicit.items import next_item, own_item
from torch_attn.kernels.explicit.terms import bias_box_bytes, load_bias_box
from torch_attn.kernels.explicit.tma import load_pieces, load_tile, tile_bytes
from torch_attn.kernels.sm90.spans import from_left
from torch_attn.kernels.sm90.work import locate_queries


@gluon.jit
def _step_to_take(total):
    """Return the step after which the next item is taken, for an item of `total` tiles of keys.

    Taking one takes longer than a step: the consumers should still have loaded tiles. It is not
    much earlier in a long item: another program may be free first.
    """
    return gl.maximum(total - 2, 1)


@gluon.jit
def produce_keys(
    tiles, barriers, shared, counter_ptr, loads, bias, carried, problem, window_left, window_right,
    lists, BLOCK_Q: gl.constexpr, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr, PASSES_OVER: gl.constexpr, FROM_LEFT: gl.constexpr,
):  # fmt: skip
    """Load tiles in one warp.

    PASSES_OVER: one that sees no key in its intervals is not an item. FROM_LEFT: no masked tile of
    keys goes first.
    """
    q_tile, k_tile, v_tile, _out_tile, bias_tile = tiles
    q_full, q_read, k_full, v_full = barriers
    q, k, v = loads
    NUM_CONSUMERS: gl.constexpr = BLOCK_Q // 64
    NUM_TILES_Q: gl.constexpr = q_tile[0].shape[0]
    NUM_STAGES: gl.constexpr = k_tile[0].shape[0]
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    READERS: gl.constexpr = 128 * NUM_CONSUMERS + 32
    NUM_HALVES: gl.constexpr = q_read.shape[0] - NUM_TILES_Q  # consumers with other columns
    HAS_LISTS: gl.constexpr = problem.tiles is not None
    step = 0  # counted over all items
    turn = 0
    next_item(
        turn, problem, shared, counter_ptr, BLOCK_Q, True, (), (), problem.heads_q, BLOCK_KV,
        PASSES_OVER,
    )  # fmt: skip
    item, place = own_item(turn, problem, shared)
    while item < problem.num_items:
        batch, head, rows, keys, visible = locate_queries(
            item, place, problem, window_left, window_right, lists, BLOCK_Q, BLOCK_KV
        )
        if FROM_LEFT:
            visible = from_left(visible)
        _begin, before, full, after = visible
        head_kv = head // GROUP_SIZE
        total = before + full + after
        if len(carried) > 0:
            first = head_rows(
                carried[0], batch, rows.end, rows.start, head, problem.heads_q, HEAD_DIM_V
            )
            prefetch_carry(first, rows.end - rows.start, problem.heads_q, BLOCK_Q, HEAD_DIM_V)
        for i in range(total + 1):
            # Keys are loaded one tile ahead of values, in the order of use.
            if i < total:
                slot = step % NUM_STAGES
                if HAS_LISTS:
                    # Load while the previous tile is still read.
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
                    for half in gl.static_range(NUM_HALVES):
                        mbarrier.wait(q_read.index(NUM_TILES_Q + half), phase ^ 1)
                    load_tile(
                        q, q_tile, slot, batch, head, rows.start + consumer * 64,
                        q_full.index(slot), HEAD_DIM,
                    )  # fmt: skip
            else:
                slot = (step - 1) % NUM_STAGES
                if step > NUM_STAGES:
                    wait_for_all(V_READ + slot, READERS + 128 * NUM_HALVES)
                row = keys.first
                row += kept_start(lists, batch, head, rows.start, i - 1, visible, BLOCK_KV)
                load_tile(v, v_tile, slot, batch, head_kv, row, v_full.index(slot), HEAD_DIM_V)
            if i == _step_to_take(total):
                next_item(
                    turn + 1, problem, shared, counter_ptr, BLOCK_Q, True, (), (), problem.heads_q,
                    BLOCK_KV, PASSES_OVER,
                )  # fmt: skip
            step += 1
        step -= 1
        turn += 1
        item, place = own_item(turn, problem, shared)
