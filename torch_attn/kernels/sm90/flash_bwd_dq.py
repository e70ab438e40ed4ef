"""dq of the backward for SM90, in a kernel of its own."""

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
    READERS,
    V_READ,
    allocate_barriers,
    arrive,
    wait_for_all,
)
from torch_attn.kernels.explicit.carry import add_carry, head_rows
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
    locate_pairs,
    next_item,
    own_item,
    persistent,
    tiles_of_list,
)
from torch_attn.kernels.explicit.registers import copy_layout, pack, scale_all, unpack
from torch_attn.kernels.explicit.steps import (
    rows_have_padding,
    step_has_padding,
    step_start,
)
from torch_attn.kernels.explicit.terms import (
    adds_terms,
    drop_scaled,
    head_terms,
    prepare_tile,
    store_bias,
)
from torch_attn.kernels.explicit.tma import (
    allocate_tile,
    clear_padding,
    clear_rows,
    load_tile,
    maps_of,
    num_pieces,
    piece,
    piece_start,
    store_result,
    stored_maps_of,
)
from torch_attn.kernels.explicit.wgmma import (
    add_product,
    product_layout,
    product_scores,
    wait_product,
    zeros,
)
from torch_attn.kernels.explicit.wgmma_scores import visible_scores
from torch_attn.kernels.library.sequences import count_sequence_tiles
from torch_attn.kernels.library.softmax import LOG2E
from torch_attn.kernels.library.terms import terms_argument
from torch_attn.kernels.library.tiles import ROW_PADDING, head_base, strides_of, visible_tiles
from torch_attn.launch import UNSPECIALIZED, KernelCall, Prepared
from twin_attention.contract.spec import PartialSpec, VarlenSpec, Window
from twin_attention.targets import sm90
from twin_attention.targets.steps import steps_of_queries


@gluon.jit(do_not_specialize=[*UNSPECIALIZED, "num_items"])
def flash_bwd_dq_kernel(
    q,
    k,
    v,
    dout,
    out,
    statistics,
    dq,
    counter_ptr,
    terms,
    mask,
    out_strides,
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
    BLOCK_KV: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    EDGES: gl.constexpr,
):
    """One program computes tiles of 128 rows of dq, one after the other.

    Roles of the warps and descriptors: as in `flash_fwd_kernel`. A consumer issues ds·k of a tile
    of keys with q·kᵀ of the next. Under a tile's first q·kᵀ it computes lse2 and delta of its
    rows, and stores them for the kernel of dk and dv. Operands: those of the portable
    `flash_bwd_preprocess_kernel` and `flash_bwd_dq_kernel`; of the statistics lse2 and delta are
    outputs. Loop
    invariant and accumulation: as in the latter. Packed sequences and counter_ptr, as in
    `flash_fwd_kernel`: of a tile without rows the producer prepares those of lse2 and delta.

    With intervals in the mask dq, in float32 by its pointer, holds that through other keys, and the
    program adds to it. The statistics' lse2 and delta are inputs then, and lse and out None; a tile
    that sees no key is passed over.

    out, out_strides: its descriptors and None; or, where shared memory has no room for its rows,
        nor for more than NUM_STAGES - 1 tiles of v, its pointer and `Strides`.
    """
    dtype: gl.constexpr = q[0].dtype
    # The next tile of keys is awaited before the last one is released.
    gl.static_assert(NUM_STAGES >= 2)
    gl.static_assert(NUM_STAGES <= MAX_STAGES)
    q_tile = allocate_tile(dtype, 2, 64, HEAD_DIM)
    do_tile = allocate_tile(dtype, 2, 64, HEAD_DIM_V)
    out_tile = ()
    if out is not None and out_strides is None:
        out_tile = allocate_tile(dtype, 2, 64, HEAD_DIM_V)
    V_STAGES: gl.constexpr = NUM_STAGES if out_strides is None else NUM_STAGES - 1
    k_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_KV, HEAD_DIM)
    v_tile = allocate_tile(dtype, V_STAGES, BLOCK_KV, HEAD_DIM_V)
    q_full = allocate_barriers(2)
    do_full = allocate_barriers(2)
    out_full = allocate_barriers(2)
    q_read = allocate_barriers(2)
    k_full = allocate_barriers(NUM_STAGES)
    v_full = allocate_barriers(V_STAGES)
    fence_async_shared()

    tiles = (q_tile, do_tile, out_tile, k_tile, v_tile)
    barriers = (q_full, do_full, out_full, q_read, k_full, v_full)
    shared = ()
    if are_counted(num_sequences, mask.segments, mask.tree) or mask.intervals is not None:
        shared = allocate_hand_over(2, are_listed(mask.segments, mask.tree))
    problem = Problem(
        seq_q, seq_kv, diagonal, heads_q, num_items, together, mask.offsets.q, mask.offsets.kv,
        num_sequences, mask.segments, mask.tree, mask.depths, mask.intervals,
    )  # fmt: skip
    # Constants stand in the calls: variables would make tensors of them. The last part loads.
    gl.warp_specialize(
        [
            (_consume_keys, (
                tiles, barriers, shared, out, out_strides, statistics, dq, problem, rule, terms,
                window_left, window_right, part, HEAD_DIM, HEAD_DIM_V, EDGES,
            ))
            if part < 2
            else (_produce_keys, (
                tiles, barriers, shared, counter_ptr, (statistics.lse2, statistics.delta),
                (q, dout, out), (k, v), problem, window_left, window_right, GROUP_SIZE, HEAD_DIM,
                HEAD_DIM_V,
            ))
            for part in (0, 1, 2)
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit
def _locate_queries(item, place, problem, window_left, window_right, BLOCK_KV: gl.constexpr):
    """Return batch, head, rows, keys, shift, rows to read and tiles of keys of a work item.

    `place`: of `next_item`. shift: how far lse2's and delta's rows are from the queries. Of q and
    dout no rows are read in padding. The tiles of keys are what `visible_tiles` returns; where
    nothing is visible, one masked tile, so that no consumer has to do without.
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
def _produce_keys(
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
    """Load all that the consumers of dq multiply."""
    q_tile, do_tile, out_tile, k_tile, v_tile = tiles
    q_full, do_full, out_full, q_read, k_full, v_full = barriers
    q, dout, out = of_queries
    k, v = of_keys
    NUM_STAGES: gl.constexpr = k_tile[0].shape[0]
    V_STAGES: gl.constexpr = v_tile[0].shape[0]
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    step = 0  # over all items
    turn = 0
    item, place = next_item(
        turn, problem, shared, counter_ptr, 128, True, row_ptrs, problem.heads_q, BLOCK_KV, True
    )
    while item < problem.num_items:
        batch, head, rows, keys, _shift, _read_rows, visible = _locate_queries(
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
                    mbarrier.wait(q_read.index(consumer), (turn & 1) ^ 1)
                    load_tile(
                        q, q_tile, consumer, batch, head, first, q_full.index(consumer), HEAD_DIM
                    )
                    load_tile(
                        dout, do_tile, consumer, batch, head, first, do_full.index(consumer),
                        HEAD_DIM_V,
                    )  # fmt: skip
                    if len(out_tile) > 0:
                        load_tile(
                            out, out_tile, consumer, batch, head, first, out_full.index(consumer),
                            HEAD_DIM_V,
                        )  # fmt: skip
            slot = step % V_STAGES
            if step >= V_STAGES:
                wait_for_all(V_READ + slot, READERS)
            load_tile(v, v_tile, slot, batch, head_kv, row, v_full.index(slot), HEAD_DIM_V)
            step += 1
        turn += 1
        item, place = next_item(
            turn, problem, shared, counter_ptr, 128, True, row_ptrs, problem.heads_q, BLOCK_KV, True
        )


@gluon.jit
def _consume_keys(
    tiles,
    barriers,
    shared,
    out,
    out_strides,
    statistics,
    dq_maps,
    problem,
    rule,
    terms,
    window_left,
    window_right,
    CONSUMER: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    EDGES: gl.constexpr,
):
    """Compute 64 rows of dq of each of a program's work items."""
    q_tile, do_tile, out_tile, k_tile, v_tile = tiles
    q_full, do_full, out_full, q_read, k_full, v_full = barriers
    total_q, heads_q = problem.size, problem.heads_q
    IS_PACKED: gl.constexpr = problem.num_sequences is not None
    # The keys are some of all; rows are prepared, and dq joins that through others.
    IS_PART: gl.constexpr = problem.intervals is not None
    HAS_LISTS: gl.constexpr = are_listed(problem.segments, problem.tree)
    NUM_STAGES: gl.constexpr = k_tile[0].shape[0]
    ADDS: gl.constexpr = adds_terms(terms.bias.entries, terms.relative, terms.slopes)
    HAS_TERMS: gl.constexpr = ADDS or terms.seed is not None
    V_STAGES: gl.constexpr = v_tile[0].shape[0]
    BLOCK_KV: gl.constexpr = k_tile[0].shape[3]
    dtype: gl.constexpr = q_tile[0].dtype
    layout: gl.constexpr = product_layout(BLOCK_KV)
    of_row: gl.constexpr = gl.SliceLayout(1, layout)
    step = 0  # over all items
    turn = 0
    item, place = own_item(turn, problem, shared, CONSUMER)
    while item < problem.num_items:
        batch, head, positions, keys, shift, read_rows, visible = _locate_queries(
            item, place, problem, window_left, window_right, BLOCK_KV
        )
        start_q, seq_q, diagonal = positions
        first_kv, seq_kv = keys
        begin, before, full, after = visible
        rows = start_q + CONSUMER * 64 + gl.arange(0, 64, of_row)
        position, reach_left, reach_right = rows + diagonal, window_left, window_right
        row_q = batch.to(gl.int64) * problem.size
        row_kv = batch.to(gl.int64) * problem.size_other + first_kv
        marks = mark_queries(problem, row_q, row_kv, rows, seq_q)
        first = start_q + CONSUMER * 64
        pairs = locate_pairs(problem, place, batch, head, first, first + diagonal)
        of_head = head_terms(terms, pairs.element, head)
        first_row = (batch * heads_q + head).to(gl.int64) * total_q
        if IS_PART:
            position, reach_right = load_windows(problem.intervals, rows, seq_q)
            reach_left = 0
            reach_right = reach_right[:, None]
        else:
            lse = gl.load(statistics.lse + first_row + rows, mask=rows < seq_q, other=float("inf"))

        # The first tile of keys has no ds·k to run under its exponentials.
        of_keys = (0, 0, 0, False)
        if HAS_LISTS:
            start_kv = step_start(0, begin, before, full, after, BLOCK_KV)
            of_keys = load_keys(problem, marks, start_kv, seq_kv, BLOCK_KV, layout)
        slot = step % NUM_STAGES
        slot_v = step % V_STAGES
        mbarrier.wait(q_full.index(CONSUMER), turn & 1)
        mbarrier.wait(k_full.index(slot), step // NUM_STAGES & 1)
        if IS_PACKED:
            # What is another sequence's, or padding, may be NaN.
            rest = seq_kv - step_start(0, begin, before, full, after, BLOCK_KV)
            clear_rows(k_tile, slot, rest, k_full.index(slot), step // NUM_STAGES & 1)
            clear_rows(v_tile, slot_v, rest, v_full.index(slot_v), step // V_STAGES & 1)
            clear_rows(q_tile, CONSUMER, read_rows, q_full.index(CONSUMER), turn & 1)
            clear_rows(do_tile, CONSUMER, read_rows, do_full.index(CONSUMER), turn & 1)
        if problem.segments is not None:
            padded = step_has_padding(0, begin, before)
            clear_padding(
                k_tile, slot, marks.other_ids, start_kv, seq_kv, padded, k_full.index(slot),
                step // NUM_STAGES & 1,
            )  # fmt: skip
            clear_padding(
                v_tile, slot_v, marks.other_ids, start_kv, seq_kv, padded, v_full.index(slot_v),
                step // V_STAGES & 1,
            )  # fmt: skip
            padded, first = rows_have_padding(begin), start_q + CONSUMER * 64
            clear_padding(
                q_tile, CONSUMER, marks.own_ids, first, seq_q, padded,
                q_full.index(CONSUMER), turn & 1,
            )  # fmt: skip
            clear_padding(
                do_tile, CONSUMER, marks.own_ids, first, seq_q, padded,
                do_full.index(CONSUMER), turn & 1,
            )  # fmt: skip
        s = product_scores(q_tile, CONSUMER, k_tile, slot, HEAD_DIM, layout)
        of_tile = (0, 0, 0)
        if HAS_TERMS:
            start_kv = step_start(0, begin, before, full, after, BLOCK_KV)
            of_tile = prepare_tile(
                terms, of_head, pairs.first, start_kv, start_kv - pairs.position, seq_q, seq_kv,
                64, BLOCK_KV, layout,
            )  # fmt: skip
        # delta = rowsum(dout ∘ out) - dlse; lse2 is +inf where a row saw no key or does not exist
        mbarrier.wait(do_full.index(CONSUMER), turn & 1)
        if len(out_tile) > 0:
            mbarrier.wait(out_full.index(CONSUMER), turn & 1)
            delta = _dot_rows(do_tile, out_tile, CONSUMER, of_row)
        elif not IS_PART:
            base = head_base(out, out_strides, batch, head)
            first = start_q + CONSUMER * 64
            delta = _dot_loaded(
                do_tile, CONSUMER, base, first, seq_q, out_strides.row, HEAD_DIM_V, of_row
            )
        if IS_PACKED:
            delta = gl.where(rows < seq_q, delta, 0.0)
        if statistics.dlse is not None:
            has_key = (rows < seq_q) & (lse != float("-inf"))
            delta -= gl.load(statistics.dlse + first_row + rows, mask=has_key, other=0.0)
        if not IS_PART:
            lse2 = gl.where(lse == float("-inf"), float("inf"), lse) * LOG2E
        padded_rows = (
            count_sequence_tiles(total_q, problem.num_sequences, ROW_PADDING) * ROW_PADDING
        )
        first_row = (batch * heads_q + head).to(gl.int64) * padded_rows + shift
        if IS_PART:
            lse2 = gl.load(statistics.lse2 + first_row + rows)
            delta = gl.load(statistics.delta + first_row + rows)
        else:
            gl.store(statistics.lse2 + first_row + rows, lse2)
            gl.store(statistics.delta + first_row + rows, delta)
        mbarrier.wait(v_full.index(slot_v), step // V_STAGES & 1)
        dp = product_scores(do_tile, CONSUMER, v_tile, slot_v, HEAD_DIM_V, layout)
        s = warpgroup_mma_wait(num_pieces(HEAD_DIM_V), deps=(s,))
        key = step_start(0, begin, before, full, after, BLOCK_KV)
        p = _probabilities(
            s, position, key, lse2[:, None], seq_kv, rule, reach_left, reach_right, problem, marks,
            of_keys, EDGES, BLOCK_KV, terms, of_head, of_tile,
        )  # fmt: skip
        dp = warpgroup_mma_wait(0, deps=(dp,))
        arrive(V_READ + slot_v, READERS)
        dp = drop_scaled(dp, terms, of_tile)
        ds = p * (dp - delta[:, None])
        if terms.dbias.entries is not None:
            store_bias(terms.dbias, ds, pairs, key, seq_q, seq_kv)
        ds = pack(ds, dtype)
        dq = zeros(64, HEAD_DIM)

        # Visit the other tiles of keys that these queries see; only tiles at the edges are masked.
        index = 1
        step += 1
        for masked in gl.static_range(1 if EDGES else 0, -1, -1):
            end = before + full + after
            if masked:
                end = before + after
            while index < end:
                slot = step % NUM_STAGES
                slot_v = step % V_STAGES
                previous = (step - 1) % NUM_STAGES
                own = CONSUMER
                if len(out_tile) == 0:
                    # 0, which the compiler does not know: it would compute the descriptors of q and
                    # dout before the loop, for which there are no registers.
                    own += step >> 30
                if IS_PACKED and masked:
                    rest = seq_kv - step_start(index, begin, before, full, after, BLOCK_KV)
                    clear_rows(k_tile, slot, rest, k_full.index(slot), step // NUM_STAGES & 1)
                    clear_rows(v_tile, slot_v, rest, v_full.index(slot_v), step // V_STAGES & 1)
                if problem.segments is not None and masked:
                    start_kv = step_start(index, begin, before, full, after, BLOCK_KV)
                    padded = step_has_padding(index, begin, before)
                    clear_padding(
                        k_tile, slot, marks.other_ids, start_kv, seq_kv, padded, k_full.index(slot),
                        step // NUM_STAGES & 1,
                    )  # fmt: skip
                    clear_padding(
                        v_tile, slot_v, marks.other_ids, start_kv, seq_kv, padded,
                        v_full.index(slot_v), step // V_STAGES & 1,
                    )  # fmt: skip
                # dq += ds k for the tile before, and s = scale · q kᵀ
                left = unpack(ds, dtype, layout, "loop")
                dq = add_product(dq, left, k_tile, previous)
                mbarrier.wait(k_full.index(slot), step // NUM_STAGES & 1)
                s = product_scores(q_tile, own, k_tile, slot, HEAD_DIM, layout)
                dq, left = wait_product(dq, left, num_pieces(HEAD_DIM))
                arrive(K_READ + previous, READERS)
                # dp = dout vᵀ
                mbarrier.wait(v_full.index(slot_v), step // V_STAGES & 1)
                dp = product_scores(do_tile, own, v_tile, slot_v, HEAD_DIM_V, layout)
                if HAS_TERMS:
                    start_kv = step_start(index, begin, before, full, after, BLOCK_KV)
                    of_tile = prepare_tile(
                        terms, of_head, pairs.first, start_kv, start_kv - pairs.position, seq_q,
                        seq_kv, 64, BLOCK_KV, layout,
                    )  # fmt: skip
                # p = exp(s - lse)
                s = warpgroup_mma_wait(num_pieces(HEAD_DIM_V), deps=(s,))
                key = step_start(index, begin, before, full, after, BLOCK_KV)
                hidden = (0, 0, 0, False)
                if HAS_LISTS and masked:
                    hidden = load_keys(problem, marks, key, seq_kv, BLOCK_KV, layout)
                p = _probabilities(
                    s, position, key, lse2[:, None], seq_kv, rule, reach_left, reach_right,
                    problem, marks, hidden, masked, BLOCK_KV, terms, of_head, of_tile,
                )  # fmt: skip
                # This wait passes at once. Its branch keeps ptxas from moving the next one up.
                mbarrier.wait(v_full.index(slot_v), step // V_STAGES & 1)
                dp = warpgroup_mma_wait(0, deps=(dp,))
                arrive(V_READ + slot_v, READERS)
                dp = drop_scaled(dp, terms, of_tile)
                # ds = p ∘ (dp - delta) ∘ dcap
                ds = p * (dp - delta[:, None])
                if terms.dbias.entries is not None:
                    store_bias(terms.dbias, ds, pairs, key, seq_q, seq_kv)
                ds = pack(ds, dtype)
                index += 1
                step += 1

        # The last ds·k
        previous = (step - 1) % NUM_STAGES
        left = unpack(ds, dtype, layout, "end")
        dq = add_product(dq, left, k_tile, previous)
        dq, left = wait_product(dq, left)
        arrive(K_READ + previous, READERS)

        # Scale and store where q was, or add to what other keys gave.
        dq = scale_all(dq, rule.scale)
        if IS_PART:
            carried = head_rows(
                dq_maps[0], batch, seq_q, start_q + CONSUMER * 64, head, heads_q, HEAD_DIM
            )
            add_carry(carried, dq, rows < seq_q, heads_q, HEAD_DIM)
        else:
            store_result(
                dq_maps, q_tile, CONSUMER, dq, batch, head, start_q, seq_q, heads_q,
                IS_PACKED, HEAD_DIM,
            )  # fmt: skip
            tma.store_wait(0)
        mbarrier.arrive(q_read.index(CONSUMER), count=1)
        turn += 1
        item, place = own_item(turn, problem, shared, CONSUMER)


@gluon.jit
def _dot_rows(a, b, slot, LAYOUT: gl.constexpr):
    """Return the product of each row of a tile with that of another tile."""
    dot = gl.zeros([64], gl.float32, LAYOUT)
    for i in gl.static_range(len(a)):
        dot += _dot_pieces(piece(a[i], slot), piece(b[i], slot), LAYOUT)
    return dot


@gluon.jit
def _dot_pieces(a, b, LAYOUT: gl.constexpr):
    layout: gl.constexpr = product_layout(a.shape[1])
    products = a.load(layout).to(gl.float32) * b.load(layout).to(gl.float32)
    return gl.convert_layout(gl.sum(products, 1), LAYOUT, assert_trivial=True)


@gluon.jit
def _dot_loaded(
    tile,
    slot,
    base,
    start,
    num_rows,
    STRIDE: gl.constexpr,
    SIZE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Return the product of each row of a tile with that of a matrix in memory, from `start` on."""
    dot = gl.zeros([64], gl.float32, LAYOUT)
    for i in gl.static_range(len(tile)):
        dot += _dot_loaded_piece(
            piece(tile[i], slot), base, start, num_rows, STRIDE, piece_start(SIZE, i), SIZE, LAYOUT
        )
    return dot


@gluon.jit
def _dot_loaded_piece(
    a,
    base,
    start,
    num_rows,
    STRIDE: gl.constexpr,
    FIRST: gl.constexpr,
    SIZE: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    layout: gl.constexpr = copy_layout(a.shape[1], 4)
    rows = start + gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    columns = FIRST + gl.arange(0, a.shape[1], gl.SliceLayout(0, layout))[None, :]
    exists = (rows < num_rows) & (columns < SIZE)
    b = gl.load(base + rows.to(gl.int64) * STRIDE + columns, mask=exists, other=0.0)
    products = a.load(layout).to(gl.float32) * b.to(gl.float32)
    return gl.convert_layout(gl.sum(products, 1), LAYOUT)


@gluon.jit
def _probabilities(
    s,
    position,
    start_kv,
    lse2,
    end,
    rule,
    window_left,
    window_right,
    problem,
    marks,
    of_keys,
    MASKED: gl.constexpr,
    BLOCK_KV: gl.constexpr,
    terms,
    of_head,
    of_tile,
):
    """Return p ∘ dcap, the factor of dp - delta in ds. Queries are rows."""
    key = start_kv + gl.arange(0, BLOCK_KV, gl.SliceLayout(0, s.type.layout))
    s, scale, dcap = visible_scores(
        s, position[:, None], key[None, :], end, rule, window_left, window_right, MASKED, terms,
        of_head, of_tile,
    )  # fmt: skip
    if MASKED:
        s = hide_keys(s, problem, marks, position, of_keys)
    return gl.exp2(s * scale - lse2) * dcap


def prepare_dq(call: KernelCall) -> Prepared:
    """Return grid and arguments of `flash_bwd_dq_kernel`."""
    spec, config = call.spec, call.config
    assert config.block_q == 128
    q, k, v, dout, out, _statistics, dq, *_ = call.layouts
    large = sm90.has_large_heads(spec)
    arguments = {
        "q": maps_of(q, 64),
        "k": maps_of(k, config.block_kv),
        "v": maps_of(v, config.block_kv),
        "dout": maps_of(dout, 64),
        "out": out if large or out is None else maps_of(out, 64),
        "out_strides": strides_of(out=out).out if large else None,
        "dq": stored_maps_of(spec, dq, 64),
        "EDGES": isinstance(spec, VarlenSpec | PartialSpec)
        or spec.segmented
        or spec.tree
        or spec.window != Window()
        or spec.seq_kv % config.block_kv != 0,
        **terms_argument(call),
    }
    steps = steps_of_queries(spec, config.block_q, config.block_kv)
    return persistent(call, steps, spec.heads_q * spec.batch, arguments)
