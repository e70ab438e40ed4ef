"""The warp that adds dq to its sums beside dk and dv, and how consumers hand dq to it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from torch_attn.kernels.explicit.barriers import DQ_FREE, DQ_WRITTEN, arrive, wait_for_all
from torch_attn.kernels.explicit.items import own_item
from torch_attn.kernels.explicit.reduction import add_box
from torch_attn.kernels.explicit.sections import place_of_head, report_added
from torch_attn.kernels.explicit.steps import group_step
from torch_attn.kernels.explicit.tma import store_box
from torch_attn.kernels.library.sequences import count_sequence_tiles
from torch_attn.kernels.library.tiles import ROW_PADDING
from torch_attn.kernels.sm90.queries import head_index, locate_keys
from torch_attn.kernels.sm90.sums import add_dq, write_dq

# A consumer's threads and those of the warp that adds.
ADDERS = gl.constexpr(128 + 32)


@gluon.jit
def add_queries(
    of_dq, shared, sections, problem, window_left, window_right, dq_sum, dbias,
    ADDS_BIAS: gl.constexpr, BLOCK_Q: gl.constexpr, MEMBERS: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Add the tiles of dq that the consumers write to its sums.

    sections: (), or `Sections`; the producer awaits an item's section. dbias: None, or the
    descriptor of a bias' gradient, whose tiles are ds as written. ADDS_BIAS: batch elements share
    that bias, and each adds its ds.
    """
    ds_buffer, dq_tiles = of_dq
    tiles_per_head = count_sequence_tiles(
        problem.size_other, problem.num_sequences, ROW_PADDING
    ) * (ROW_PADDING // BLOCK_Q)  # fmt: skip
    step = 0  # counted over all items
    turn = 0
    item, place = own_item(turn, problem, shared, 2)
    while item < problem.num_items:
        batch, first_head, keys, queries, visible = locate_keys(
            item, place, problem, window_left, window_right, True, MEMBERS, BLOCK_Q
        )
        first_sums = batch * problem.heads_q + first_head
        if len(sections) > 0:
            first_sums = place_of_head(sections, head_index(item, place, problem)) * MEMBERS
        begin, before, full, after = visible
        for i in range((before + full + after) * MEMBERS):
            member, start = group_step(i, begin, before, full, after, BLOCK_Q, MEMBERS)
            tile = (first_sums + member) * tiles_per_head
            tile += (queries.first_row + start) // BLOCK_Q
            tma.store_wait(0)
            for consumer in gl.static_range(2):
                if len(dq_tiles[consumer]) > 0 or dbias is not None:
                    arrive(DQ_FREE + consumer, ADDERS)
            for consumer in gl.static_range(2):
                if len(dq_tiles[consumer]) > 0 or dbias is not None:
                    wait_for_all(DQ_WRITTEN + consumer, ADDERS)
                if len(dq_tiles[consumer]) > 0:
                    fence_async_shared()
                    add_dq(dq_sum, dq_tiles[consumer], tile, consumer, HEAD_DIM)
            if dbias is not None:
                for half in gl.static_range(2):
                    tile_of_half = ds_buffer.index(step % 2 * 2 + half)
                    head, key = first_head + member, keys.start + 64 * half
                    if ADDS_BIAS:
                        add_box(dbias, [0, head, start, key], tile_of_half)
                    else:
                        store_box(dbias, [batch, head, start, key], tile_of_half)
            step += 1
        if len(sections) > 0:
            report_added(sections, item)
        turn += 1
        item, place = own_item(turn, problem, shared, 2)
    tma.store_wait(0)


@gluon.jit
def hand_over(dq, dq_tiles, STORES: gl.constexpr, CONSUMER: gl.constexpr):
    """Write this consumer's part of dq, if it has one, for the warp that adds it.

    That warp has the fence: here it would wait until the stores are done. If it STORES ds, it has
    read the previous tile's ds, which this consumer overwrites next.
    """
    if len(dq) > 0 or STORES:
        wait_for_all(DQ_FREE + CONSUMER, ADDERS)
        if len(dq) > 0:
            write_dq(dq_tiles, dq)
        arrive(DQ_WRITTEN + CONSUMER, ADDERS)
