"""The producer warp of forward mode for SM90."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_attn.kernels.explicit.barriers import K_READ, V_READ, wait_for_all
from torch_attn.kernels.explicit.items import next_item
from torch_attn.kernels.explicit.steps import step_start
from torch_attn.kernels.explicit.tma import load_pieces, tile_bytes
from torch_attn.kernels.sm90.work import locate_queries


@gluon.jit
def produce_keys(
    tiles,
    barriers,
    shared,
    counter_ptr,
    loads,
    tangents,
    problem,
    window_left,
    window_right,
    GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
):
    q_tile, dq_tile, k_tile, dk_tile, v_tile, dv_tile, _out_tile, _dout_tile = tiles
    q_full, q_read, k_full, v_full = barriers
    q, k, v = loads
    BLOCK_Q: gl.constexpr = 64 * q_tile[0].shape[0]
    NUM_STAGES: gl.constexpr = k_tile[0].shape[0]
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    READERS: gl.constexpr = 2 * BLOCK_Q + 32
    step = 0  # counted over all items
    turn = 0
    item, place = next_item(
        turn, problem, shared, counter_ptr, BLOCK_Q, True, (), (), problem.heads_q, BLOCK_KV
    )
    while item < problem.num_items:
        batch, head, rows, keys, visible = locate_queries(
            item, place, problem, window_left, window_right, None, BLOCK_Q, BLOCK_KV
        )
        begin, before, full, after = visible
        head_kv = head // GROUP_SIZE
        for i in range(before + full + after):
            slot = step % NUM_STAGES
            row = keys.first + step_start(i, begin, before, full, after, BLOCK_KV)
            if step >= NUM_STAGES:
                wait_for_all(K_READ + slot, READERS)
            _load(
                (k, tangents.k), (k_tile, dk_tile), slot, batch, head_kv, row, k_full.index(slot),
                HEAD_DIM,
            )  # fmt: skip
            if i == 0:
                for consumer in gl.static_range(BLOCK_Q // 64):
                    mbarrier.wait(q_read.index(consumer), turn & 1 ^ 1)
                    _load(
                        (q, tangents.q), (q_tile, dq_tile), consumer, batch, head,
                        rows.start + consumer * 64, q_full.index(consumer), HEAD_DIM,
                    )  # fmt: skip
            if step >= NUM_STAGES:
                wait_for_all(V_READ + slot, READERS)
            _load(
                (v, tangents.v), (v_tile, dv_tile), slot, batch, head_kv, row, v_full.index(slot),
                HEAD_DIM_V,
            )  # fmt: skip
            step += 1
        turn += 1
        item, place = next_item(
            turn, problem, shared, counter_ptr, BLOCK_Q, True, (), (), problem.heads_q, BLOCK_KV
        )


@gluon.jit
def _load(maps, tiles, slot, batch, head, row, full, SIZE: gl.constexpr):
    """Load a tile and that of its tangents, if there are any."""
    COUNT: gl.constexpr = 2 if len(tiles[1]) > 0 else 1
    mbarrier.expect(full, COUNT * tile_bytes(tiles[0][0].shape[3], SIZE))
    for i in gl.static_range(COUNT):
        load_pieces(maps[i], tiles[i], slot, batch, head, row, full, SIZE)
