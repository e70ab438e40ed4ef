"""The producer warp of dq's kernel in the SM90 backward."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_attn.kernels.explicit.barriers import K_READ, READERS, V_READ, wait_for_all
from torch_attn.kernels.explicit.items import next_item
from torch_attn.kernels.explicit.steps import step_start
from torch_attn.kernels.explicit.tma import load_tile
from torch_attn.kernels.sm90.work import locate_queries


@gluon.jit
def produce_keys(
    tiles, barriers, shared, counter_ptr, row_ptrs, of_queries, of_keys, problem, window_left,
    window_right, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
):  # fmt: skip
    """Load tiles; k and v are tuples, in forward mode with their tangents, and dout is q's."""
    q_tile, do_tile, out_tile, k_tile, v_tile = tiles
    q_full, do_full, out_full, q_read, k_full, v_full = barriers
    q, dout, out = of_queries
    k, v = of_keys
    BLOCK_Q: gl.constexpr = 64 * min(q_tile[0].shape[0], 2)
    Q_STAGES: gl.constexpr = 64 * q_tile[0].shape[0] // BLOCK_Q
    NUM_STAGES: gl.constexpr = k_tile[0][0].shape[0]
    V_STAGES: gl.constexpr = v_tile[0][0].shape[0]
    BLOCK_KV: gl.constexpr = k_tile[0][0].shape[3]
    step = 0  # counted over all items
    turn = 0
    item, place = next_item(
        turn, problem, shared, counter_ptr, BLOCK_Q, True, row_ptrs, (), problem.heads_q, BLOCK_KV,
        True,
    )  # fmt: skip
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
            for x in gl.static_range(len(k)):
                loaded = k_full[x].index(slot)
                load_tile(k[x], k_tile[x], slot, batch, head_kv, row, loaded, HEAD_DIM)
            if i == 0:
                for consumer in gl.static_range(BLOCK_Q // 64, 2):
                    mbarrier.wait(q_read.index(consumer), turn & 1 ^ 1)
                for consumer in gl.static_range(BLOCK_Q // 64):
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
            for x in gl.static_range(len(v)):
                loaded = v_full[x].index(slot)
                load_tile(v[x], v_tile[x], slot, batch, head_kv, row, loaded, HEAD_DIM_V)
            step += 1
        turn += 1
        item, place = next_item(
            turn, problem, shared, counter_ptr, BLOCK_Q, True, row_ptrs, (), problem.heads_q,
            BLOCK_KV, True,
        )  # fmt: skip
