"""Flash attention, backward, for SM80.

The same formulas as `torch_attn.kernels.portable.flash_bwd`. dq is computed in one of two ways. Its
own kernel makes the same bits every time, with seven products in all. Or the kernel of dk and dv
adds it up in float32, in any order, with five.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.explicit.barriers import barrier
from torch_attn.kernels.explicit.cp_async import (
    allocate_tile,
    commit,
    copy_arguments,
    num_pieces,
    padded_size,
    piece_start,
    piece_width,
    shared_layout,
    wait,
)
from torch_attn.kernels.explicit.mma import (
    add_product,
    add_product_shared,
    product_layout,
    product_scores,
    store_rows,
    zeros,
)
from torch_attn.kernels.explicit.mma_pairs import (
    fetch_own,
    fetch_visited,
    marks_of,
    own_keys,
    own_queries,
    pair_scores,
    store_own,
    tiles_of_keys,
    tiles_of_queries,
)
from torch_attn.kernels.explicit.registers import scale_all
from torch_attn.kernels.explicit.sequences import locate_tile
from torch_attn.kernels.explicit.steps import group_step, step_start
from torch_attn.kernels.gradients import BackwardKernels, Fused, make_flash_bwd, prepare_postprocess
from torch_attn.kernels.library.schedule import order_argument
from torch_attn.kernels.library.sequences import count_sequence_tiles, num_sequence_tiles
from torch_attn.kernels.library.tiles import ROW_PADDING, count_tiles, head_base
from torch_attn.kernels.tile_lists import listed_argument, listed_mask
from torch_attn.launch import UNSPECIALIZED, KernelCall, Prepared, flash_arguments
from twin_attention.targets.sm80 import PROGRAMS_OF_SM


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def flash_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dq_ptr, mask, strides, seq_q, seq_kv,
    diagonal, num_sequences, heads_q, rule, window_left, window_right, together,
    ASYNC: gl.constexpr, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_Q rows of dq of one query head; a warp has 16 rows or more.

    Operands, mask, loop invariant and accumulation: as in the portable
    `flash_bwd_dq_kernel`. Grid: (query tiles · heads · batch), in the order of `longest_first`.
    A warp has all keys of its rows, so ds is the left operand of ds·k in the registers where it was
    computed. NUM_STAGES 1: the next k and v are fetched at the end of a step, and the other
    programs of the SM work meanwhile; 2: they arrive during the whole step.
    """
    # Locate the tile of queries.
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    layout: gl.constexpr = product_layout(gl.num_warps())
    rows = own_queries(
        mask, seq_q, seq_kv, diagonal, num_sequences, heads_q, together, BLOCK_Q, layout
    )
    k_base = head_base(k_ptr, strides.k, rows.batch, rows.head // GROUP_SIZE, rows.first_other)
    v_base = head_base(v_ptr, strides.v, rows.batch, rows.head // GROUP_SIZE, rows.first_other)
    tiles = tiles_of_keys(
        mask, rows, seq_q, seq_kv, num_sequences, window_left, window_right, BLOCK_KV
    )

    # Start to fetch q, dout, lse2, delta, and the first keys and values.
    q_tile = allocate_tile(dtype, 1, BLOCK_Q, HEAD_DIM)
    do_tile = allocate_tile(dtype, 1, BLOCK_Q, HEAD_DIM_V)
    gl.static_assert(NUM_STAGES <= 2)
    k_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_KV, HEAD_DIM)
    v_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_KV, HEAD_DIM_V)
    start_kv = step_start(0, *tiles, BLOCK_KV)
    fetch_own(q_tile, q_ptr, strides.q, mask, rows, HEAD_DIM, ASYNC)
    fetch_own(do_tile, dout_ptr, strides.dout, mask, rows, HEAD_DIM_V, ASYNC)
    _fetch_both(
        k_tile, v_tile, 0, k_base, v_base, strides.k, strides.v, mask, rows, start_kv, HEAD_DIM,
        HEAD_DIM_V, True, ASYNC,
    )  # fmt: skip
    commit()
    marks = marks_of(mask, rows)
    row = rows.batch * heads_q + rows.head
    row = row * count_sequence_tiles(seq_q, num_sequences, ROW_PADDING) * ROW_PADDING
    row += rows.padded
    lse2 = gl.load(lse2_ptr + row + rows.rows)
    delta = gl.load(delta_ptr + row + rows.rows)
    dq = zeros(BLOCK_Q, HEAD_DIM, layout)

    # Visit the tiles of keys that these queries see; only tiles at the edges are masked.
    total = tiles.before + tiles.full + tiles.after
    step = 0
    for masked in gl.static_range(1, -1, -1):
        for _index in range(count_tiles(tiles.before, tiles.full, tiles.after, masked)):
            slot = step % NUM_STAGES
            step += 1
            # The last step fetches its own tile again, and nobody reads it.
            next_kv = step_start(gl.minimum(step, total - 1), *tiles, BLOCK_KV)
            # Wait for the keys and values; fetch the next ones.
            wait(0)
            if NUM_STAGES == 2:
                _fetch_both(
                    k_tile, v_tile, slot ^ 1, k_base, v_base, strides.k, strides.v, mask, rows,
                    next_kv, HEAD_DIM, HEAD_DIM_V, masked, ASYNC,
                )  # fmt: skip
                commit()
            # s = scale · q kᵀ
            s = product_scores(q_tile, k_tile, slot, HEAD_DIM, layout)
            s, dcap = pair_scores(
                s, mask, rows, marks, start_kv, rule, window_left, window_right, masked
            )
            # p = exp(s - lse)
            p = gl.exp2(s * rule.exp2_scale - lse2[:, None])
            # dp = dout vᵀ
            dp = product_scores(do_tile, v_tile, slot, HEAD_DIM_V, layout)
            # ds = p ∘ (dp - delta) ∘ dcap
            ds = p * (dp - delta[:, None]) * dcap
            # dq += ds k
            dq = add_product(dq, ds.to(dtype), k_tile, slot)
            start_kv = next_kv
            if NUM_STAGES == 1:
                # Fetch the next keys and values.
                barrier()
                _fetch_both(
                    k_tile, v_tile, 0, k_base, v_base, strides.k, strides.v, mask, rows, next_kv,
                    HEAD_DIM, HEAD_DIM_V, masked, ASYNC,
                )  # fmt: skip
                commit()
    wait(0)

    # Scale and store.
    store_own(dq_ptr, scale_all(dq, rule.scale), rows, heads_q, HEAD_DIM)


@gluon.jit
def _fetch_both(
    tile, tile_v, slot, base, base_v, strides, strides_v, mask, rows, start, HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr, MASKED: gl.constexpr, ASYNC: gl.constexpr,
):  # fmt: skip
    fetch_visited(tile, slot, base, strides.row, mask, rows, start, HEAD_DIM, MASKED, ASYNC)
    fetch_visited(tile_v, slot, base_v, strides_v.row, mask, rows, start, HEAD_DIM_V, MASKED, ASYNC)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def flash_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr, sums, mask, strides, seq_q,
    seq_kv, diagonal, num_sequences, heads_q, rule, window_left, window_right, together,
    ASYNC: gl.constexpr, GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_KV rows of dk and dv of one kv head, summed over its query heads.

    Operands, mask, loop invariant and accumulation: as in the portable
    `flash_bwd_dkdv_kernel`. Grid: (key tiles · kv heads · batch), in the order of `longest_first`.
    sums.dq: None, or dq's float32 sums in the order of `add_to_sum`, zero at first, with the rows
    of lse2. The program adds ds k to them; the order of these additions is not fixed.

    With 32 keys a warp, p and ds are left operands in the registers where they were computed.
    With fewer, two warps share the rows of a product, each with half of the columns, and p and ds
    go through shared memory. BLOCK_Q and BLOCK_KV are at least 8 * num_warps, and BLOCK_Q divides
    ROW_PADDING. NUM_STAGES 1: the next q and dout are fetched when dk is done; 2: they arrive
    during the whole step.
    """
    # Locate the tile of keys.
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    P_IN_REGISTERS: gl.constexpr = BLOCK_KV // gl.num_warps() >= 32
    layout: gl.constexpr = product_layout(gl.num_warps(), 1 if P_IN_REGISTERS else 2)
    heads_kv = heads_q // GROUP_SIZE
    rows = own_keys(
        mask, seq_q, seq_kv, diagonal, num_sequences, heads_kv, together, BLOCK_KV, layout
    )
    tiles = tiles_of_queries(
        mask, rows, seq_q, seq_kv, num_sequences, window_left, window_right, BLOCK_Q
    )

    # Start to fetch the keys and values, and the first queries.
    k_tile = allocate_tile(dtype, 1, BLOCK_KV, HEAD_DIM)
    v_tile = allocate_tile(dtype, 1, BLOCK_KV, HEAD_DIM_V)
    gl.static_assert(NUM_STAGES <= 2)
    q_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_Q, HEAD_DIM)
    do_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_Q, HEAD_DIM_V)
    if not P_IN_REGISTERS:
        p_buffer = gl.allocate_shared_memory(dtype, [BLOCK_KV, BLOCK_Q], shared_layout(BLOCK_Q))
    if not P_IN_REGISTERS or sums.dq is not None:
        ds_buffer = gl.allocate_shared_memory(dtype, [BLOCK_KV, BLOCK_Q], shared_layout(BLOCK_Q))
    fetch_own(k_tile, k_ptr, strides.k, mask, rows, HEAD_DIM, ASYNC)
    fetch_own(v_tile, v_ptr, strides.v, mask, rows, HEAD_DIM_V, ASYNC)
    member, start_q = group_step(0, *tiles, BLOCK_Q, GROUP_SIZE)
    head = rows.head * GROUP_SIZE + member
    q_base = head_base(q_ptr, strides.q, rows.batch, head, rows.first_other)
    do_base = head_base(dout_ptr, strides.dout, rows.batch, head, rows.first_other)
    _fetch_both(
        q_tile, do_tile, 0, q_base, do_base, strides.q, strides.dout, mask, rows, start_q, HEAD_DIM,
        HEAD_DIM_V, True, ASYNC,
    )  # fmt: skip
    commit()
    marks = marks_of(mask, rows, True)
    padded_rows = count_sequence_tiles(seq_q, num_sequences, ROW_PADDING) * ROW_PADDING
    lse2_ptr, delta_ptr = lse2_ptr + rows.padded, delta_ptr + rows.padded
    dk = zeros(BLOCK_KV, HEAD_DIM, layout)
    dv = zeros(BLOCK_KV, HEAD_DIM_V, layout)

    # Visit the tiles of queries that see these keys; only tiles at the edges are masked.
    total = (tiles.before + tiles.full + tiles.after) * GROUP_SIZE
    step = 0
    for masked in gl.static_range(1, -1, -1):
        for _ in range(count_tiles(tiles.before, tiles.full, tiles.after, masked) * GROUP_SIZE):
            # The previous step located the rows of this one.
            queries = start_q + gl.arange(0, BLOCK_Q, gl.SliceLayout(0, layout))
            start, sum_row = start_q, rows.padded + start_q
            row = (rows.batch * heads_q + head) * padded_rows
            lse2 = gl.load(lse2_ptr + row + queries)
            delta = gl.load(delta_ptr + row + queries)
            slot = step % NUM_STAGES
            step += 1
            # The last step fetches its own tile again, and nobody reads it.
            follow = gl.minimum(step, total - 1)
            member, start_q = group_step(follow, *tiles, BLOCK_Q, GROUP_SIZE)
            head = rows.head * GROUP_SIZE + member
            q_base = head_base(q_ptr, strides.q, rows.batch, head, rows.first_other)
            do_base = head_base(dout_ptr, strides.dout, rows.batch, head, rows.first_other)
            # Wait for the queries; fetch the next ones.
            wait(0)
            if NUM_STAGES == 2:
                _fetch_both(
                    q_tile, do_tile, slot ^ 1, q_base, do_base, strides.q, strides.dout, mask, rows,
                    start_q, HEAD_DIM, HEAD_DIM_V, masked, ASYNC,
                )  # fmt: skip
                commit()
            # sᵀ = scale · k qᵀ
            s = product_scores(k_tile, q_tile, slot, HEAD_DIM, layout)
            s, dcap = pair_scores(
                s, mask, rows, marks, start, rule, window_left, window_right, masked, True
            )
            # pᵀ = exp(sᵀ - lse)
            p = gl.exp2(s * rule.exp2_scale - lse2[None, :])
            if not P_IN_REGISTERS:
                p_buffer.store(p.to(dtype))
            # dpᵀ = v doutᵀ
            dp = product_scores(v_tile, do_tile, slot, HEAD_DIM_V, layout)
            # dsᵀ = pᵀ ∘ (dpᵀ - delta) ∘ dcapᵀ
            ds = p * (dp - delta[None, :]) * dcap
            if not P_IN_REGISTERS or sums.dq is not None:
                ds_buffer.store(ds.to(dtype))
            # dv += pᵀ dout, dk += dsᵀ q
            if P_IN_REGISTERS:
                dv = add_product(dv, p.to(dtype), do_tile, slot)
                dk = add_product(dk, ds.to(dtype), q_tile, slot)
            else:
                dv = add_product_shared(dv, p_buffer, do_tile, slot)
                dk = add_product_shared(dk, ds_buffer, q_tile, slot)
            if NUM_STAGES == 1:
                # Fetch the next queries.
                barrier()
                _fetch_both(
                    q_tile, do_tile, 0, q_base, do_base, strides.q, strides.dout, mask, rows,
                    start_q, HEAD_DIM, HEAD_DIM_V, masked, ASYNC,
                )  # fmt: skip
                commit()
            if sums.dq is not None:
                # dq += ds k
                dq = zeros(BLOCK_Q, HEAD_DIM, product_layout(gl.num_warps(), 2))
                dq = add_product_shared(dq, ds_buffer.permute((1, 0)), k_tile, 0)
                add_to_sum(sums.dq + row * padded_size(HEAD_DIM), dq, sum_row, padded_rows)
    wait(0)

    # Scale and store.
    store_own(dv_ptr, dv, rows, heads_kv, HEAD_DIM_V)
    store_own(dk_ptr, scale_all(dk, rule.scale), rows, heads_kv, HEAD_DIM)


@gluon.jit(do_not_specialize=["seq_q", "num_sequences"])
def flash_bwd_postprocess_kernel(
    dq_sum_ptr, dq_ptr, cu_seqlens_q_ptr, seq_q, num_sequences, heads_q, scale,
    HEAD_DIM: gl.constexpr, BLOCK_Q: gl.constexpr,
):  # fmt: skip
    """Scale and store BLOCK_Q rows of dq of one head from the sums of `add_to_sum`.

    dq [B, Sq, Hq, D] contiguous. Grid: (query tiles, heads, batch) in one axis. For packed
    sequences, as in `flash_bwd_dq_kernel`: tiles of the sums, where each sequence begins a tile.
    """
    num_tiles = gl.cdiv(seq_q, BLOCK_Q)
    if num_sequences is not None:
        num_tiles = count_sequence_tiles(seq_q, num_sequences, ROW_PADDING) * ROW_PADDING // BLOCK_Q
    start_q = gl.program_id(0) % num_tiles * BLOCK_Q
    head = gl.program_id(0) // num_tiles % heads_q
    batch = (gl.program_id(0) // num_tiles // heads_q).to(gl.int64)
    padded_rows = count_sequence_tiles(seq_q, num_sequences, ROW_PADDING) * ROW_PADDING
    padded = start_q
    if num_sequences is not None:
        _sequence, _first_q, start_q, seq_q, _first_q, _size_q = locate_tile(
            cu_seqlens_q_ptr, cu_seqlens_q_ptr, padded // ROW_PADDING, seq_q, seq_q, num_sequences,
            ROW_PADDING,
        )  # fmt: skip
        start_q += padded % ROW_PADDING
    sum_base = dq_sum_ptr + (batch * heads_q + head) * padded_rows * padded_size(HEAD_DIM)
    dq = load_sum(sum_base, padded, padded_rows, BLOCK_Q, HEAD_DIM, product_layout(gl.num_warps()))
    dq_row = heads_q * HEAD_DIM
    dq_base = dq_ptr + batch * seq_q * dq_row + head * HEAD_DIM
    store_rows(dq_base, scale_all(dq, scale), start_q, seq_q, dq_row, HEAD_DIM)


@gluon.jit
def add_to_sum(base, x, start, num_rows):
    """Add rows start .. of a head's dq to its float32 sums.

    Each column piece has its own [num_rows, width] sums, in blocks of 16 rows and 8 columns. A
    block has the order in which a product's registers hold it: the lanes of a warp add to 32
    neighbours at a time.
    """
    start, num_rows = start.to(gl.int64), num_rows.to(gl.int64)
    first = 0
    for i in gl.static_range(len(x)):
        flat = _order_as_registers(x[i])
        offsets = gl.arange(0, flat.shape[0], flat.type.layout)
        place = base + (first * num_rows + start * x[i].shape[1])
        gl.atomic_add(place + offsets, flat, sem="relaxed")
        first += x[i].shape[1]


@gluon.jit
def _order_as_registers(x):
    """Flatten a product to one axis: blocks of 16 by 8, then registers, then lanes."""
    blocks = gl.reshape(x, [x.shape[0] // 16, 2, 8, x.shape[1] // 8, 4, 2])
    return gl.reshape(gl.permute(blocks, [0, 3, 1, 5, 2, 4]), [x.shape[0] * x.shape[1]])


@gluon.jit
def load_sum(base, start, num_rows, ROWS: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    start, num_rows = start.to(gl.int64), num_rows.to(gl.int64)
    x = ()
    for i in gl.static_range(num_pieces(SIZE)):
        place = base + (piece_start(SIZE, i) * num_rows + start * piece_width(SIZE, i))
        x = x + (_load_piece(place, ROWS, piece_width(SIZE, i), LAYOUT),)
    return x


@gluon.jit
def _load_piece(base, ROWS: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    like = _order_as_registers(gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT))
    flat = gl.load(base + gl.arange(0, ROWS * WIDTH, like.type.layout))
    blocks = gl.permute(gl.reshape(flat, [ROWS // 16, WIDTH // 8, 2, 2, 8, 4]), [0, 2, 4, 1, 5, 3])
    return gl.reshape(blocks, [ROWS, WIDTH])


def _prepare_dq(call: KernelCall) -> Prepared:
    mask = listed_argument(call, of_keys=True)
    spec = call.spec
    tiles = num_sequence_tiles(spec, spec.seq_q, call.config.block_q)
    return (tiles * spec.heads_q * spec.batch,), _arguments(call, tiles, None) | mask


def _prepare_dkdv(call: KernelCall) -> Prepared:
    mask = listed_argument(call, of_keys=False)
    spec = call.spec
    tiles = num_sequence_tiles(spec, spec.seq_kv, call.config.block_kv)
    heads = spec.heads_kv * spec.batch
    *_, sums, _mask = call.layouts
    summed_heads = None if sums.dq is None else heads
    return (tiles * heads,), _arguments(call, tiles, summed_heads) | mask


def _arguments(call: KernelCall, tiles: int, summed_heads: int | None) -> dict[str, Any]:
    q, k, v, dout, *_ = call.layouts
    arguments = flash_arguments(call.spec) | copy_arguments(q=q, k=k, v=v, dout=dout)
    return arguments | order_argument(call, tiles, PROGRAMS_OF_SM, summed_heads)


flash_bwd = make_flash_bwd(
    BackwardKernels(
        dq=(flash_bwd_dq_kernel, _prepare_dq),
        dkdv=((flash_bwd_dkdv_kernel, _prepare_dkdv),),
        fused=Fused((flash_bwd_postprocess_kernel, prepare_postprocess), padded_size),
        mask_of=listed_mask,
    )
)
