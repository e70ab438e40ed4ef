"""dv of the backward for SM90, for head sizes above 128, in a kernel of its own."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma_wait

from torch_attn.kernels.explicit.barriers import DO_READ, Q_READ, READERS, arrive
from torch_attn.kernels.explicit.hidden import load_queries
from torch_attn.kernels.explicit.items import locate_pairs, own_item
from torch_attn.kernels.explicit.registers import pack, scale_all, unpack
from torch_attn.kernels.explicit.steps import group_step
from torch_attn.kernels.explicit.terms import drop, head_terms, prepare_tile
from torch_attn.kernels.explicit.tma import num_pieces, store_result
from torch_attn.kernels.explicit.wgmma import (
    add_product,
    product_layout,
    product_scores,
    wait_product,
    zeros,
)
from torch_attn.kernels.sm90.queries import (
    Reach,
    clear_keys,
    clear_queries,
    exponents_of_keys,
    locate_keys,
    mark_item,
    read_lse,
)


@gluon.jit
def consume_dv(
    tiles,
    barriers,
    shared,
    dv_maps,
    dv_tile,
    problem,
    rule,
    terms,
    window_left,
    window_right,
    CONSUMER: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    EDGES: gl.constexpr,
):
    """Compute 64 rows of dv of each of a program's work items. Keys are rows.

    dv_tile: the tile from which dv is stored, that of the keys or one of its own.
    """
    k_tile, _v_tile, q_tile, do_tile, _lse2_row, _delta_row, _bias_tile, _rest2_row = tiles
    k_full, _v_full, kv_read, q_full, do_full = barriers
    IS_PACKED: gl.constexpr = problem.num_sequences is not None
    CLEARS: gl.constexpr = IS_PACKED or problem.segments is not None
    Q_STAGES: gl.constexpr = q_tile[0].shape[0]
    DO_STAGES: gl.constexpr = do_tile[0].shape[0]
    BLOCK_Q: gl.constexpr = q_tile[0].shape[3]
    dtype: gl.constexpr = q_tile[0].dtype
    layout: gl.constexpr = product_layout(BLOCK_Q)
    step = 0  # counted over all items
    turn = 0
    item, place = own_item(turn, problem, shared, CONSUMER)
    while item < problem.num_items:
        batch, first_head, keys, queries, visible = locate_keys(
            item, place, problem, window_left, window_right, False, GROUP_SIZE, BLOCK_Q
        )
        start_kv, seq_kv, diagonal = keys
        begin, before, full, after = visible
        # Key positions, in query coordinates.
        key = start_kv + CONSUMER * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout)) - diagonal
        reach = Reach(key, None, window_left, window_right)
        marks = mark_item(problem, place, batch, keys, key)
        first = start_kv + CONSUMER * 64
        pairs = locate_pairs(problem, place, batch, first_head, first, first - diagonal)

        # The first tile of queries has no pᵀ·dout to overlap with its exponentials.
        slot = step % Q_STAGES
        mbarrier.wait(k_full.index(0), turn & 1)
        mbarrier.wait(q_full.index(slot), step // Q_STAGES & 1)
        if CLEARS:
            clear_queries(q_tile, q_full, step, 0, queries, visible, problem, marks, GROUP_SIZE)
            clear_keys(
                k_tile, CONSUMER, k_full.index(0), turn & 1, keys, queries, visible, problem, marks
            )
        s = product_scores(k_tile, CONSUMER, q_tile, slot, HEAD_DIM, layout)
        s = warpgroup_mma_wait(0, deps=(s,))
        member, start = group_step(0, begin, before, full, after, BLOCK_Q, GROUP_SIZE)
        lse = read_lse(tiles, slot, layout)
        arrive(Q_READ + slot, READERS)
        of_queries = load_queries(problem, marks, start, queries.size, BLOCK_Q, layout)
        own = head_terms(terms, pairs.element, pairs.head + member)
        of_tile = prepare_tile(
            terms, own, start, pairs.first, pairs.position - start, queries.size, problem.size,
            BLOCK_Q, 64, layout, True,
        )  # fmt: skip
        power, _dcap = exponents_of_keys(
            s, lse, start, reach, rule, problem, marks, of_queries, EDGES, terms, own, of_tile,
        )  # fmt: skip
        p = gl.exp2(power)
        packed = pack(drop(p, terms, of_tile.kept, True), dtype)
        dv = zeros(64, HEAD_DIM_V)

        # Visit the other tiles that see these keys; only tiles at the edges are masked.
        index = 1
        step += 1
        for masked in gl.static_range(1 if EDGES else 0, -1, -1):
            end = (before + full + after) * GROUP_SIZE
            if masked:
                end = (before + after) * GROUP_SIZE
            while index < end:
                if CLEARS and masked:
                    # dout's next tile may take the place of this one: it does not arrive before.
                    begun = step - index
                    clear_queries(
                        q_tile, q_full, begun, index, queries, visible, problem, marks, GROUP_SIZE
                    )
                    clear_queries(
                        do_tile, do_full, begun, index - 1, queries, visible, problem, marks,
                        GROUP_SIZE,
                    )  # fmt: skip
                slot = step % Q_STAGES
                previous = (step - 1) % DO_STAGES
                # sᵀ = scale · k qᵀ, and dv += pᵀ dout for the previous tile
                mbarrier.wait(q_full.index(slot), step // Q_STAGES & 1)
                s = product_scores(k_tile, CONSUMER, q_tile, slot, HEAD_DIM, layout)
                mbarrier.wait(do_full.index(previous), (step - 1) // DO_STAGES & 1)
                left = unpack(packed, dtype, layout, "edge" if masked else "full")
                dv = add_product(dv, left, do_tile, previous)
                s = warpgroup_mma_wait(num_pieces(HEAD_DIM_V), deps=(s,))
                # pᵀ = exp(sᵀ - lse)
                member, start = group_step(index, begin, before, full, after, BLOCK_Q, GROUP_SIZE)
                lse = read_lse(tiles, slot, layout)
                arrive(Q_READ + slot, READERS)
                of_queries = load_queries(problem, marks, start, queries.size, BLOCK_Q, layout)
                own = head_terms(terms, pairs.element, pairs.head + member)
                of_tile = prepare_tile(
                    terms, own, start, pairs.first, pairs.position - start, queries.size,
                    problem.size, BLOCK_Q, 64, layout, True,
                )  # fmt: skip
                power, _dcap = exponents_of_keys(
                    s, lse, start, reach, rule, problem, marks, of_queries, masked, terms, own,
                    of_tile,
                )  # fmt: skip
                p = gl.exp2(power)
                # This wait passes at once. Its branch keeps ptxas from hoisting the next wait.
                mbarrier.wait(do_full.index(previous), (step - 1) // DO_STAGES & 1)
                dv, left = wait_product(dv, left)
                arrive(DO_READ + previous, READERS)
                packed = pack(drop(p, terms, of_tile.kept, True), dtype)
                index += 1
                step += 1
            if CLEARS and masked:
                begun = step - index
                clear_queries(
                    do_tile, do_full, begun, index - 1, queries, visible, problem, marks, GROUP_SIZE
                )

        # The last pᵀ·dout.
        previous = (step - 1) % DO_STAGES
        mbarrier.wait(do_full.index(previous), (step - 1) // DO_STAGES & 1)
        left = unpack(packed, dtype, layout, "end")
        dv = add_product(dv, left, do_tile, previous)
        dv, left = wait_product(dv, left)
        arrive(DO_READ + previous, READERS)

        if terms.seed is not None:
            dv = scale_all(dv, terms.dropout.scale)
        # Store dv. No other warpgroup reads these rows of k.
        head_kv = first_head // GROUP_SIZE
        store_result(
            dv_maps, dv_tile, CONSUMER, dv, batch, head_kv, start_kv + CONSUMER * 64, seq_kv,
            problem.heads_q // GROUP_SIZE, IS_PACKED, HEAD_DIM_V,
        )  # fmt: skip
        tma.store_wait(0)
        mbarrier.arrive(kv_read.index(CONSUMER), count=1)
        turn += 1
        item, place = own_item(turn, problem, shared, CONSUMER)
