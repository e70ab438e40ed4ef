"""Flash attention, forward, for SM80.

The same formula and loop as `torch_attn.kernels.portable.flash_fwd`. This file spells out what the
compiler decides there: copies, waits, the layout of shared memory, and that p stays in registers.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_attn.kernels.explicit.cp_async import allocate_tile, commit, copy_arguments, wait
from torch_attn.kernels.explicit.mma import (
    add_product,
    load_left,
    product_layout,
    product_scores,
    scale_rows,
    zeros,
)
from torch_attn.kernels.explicit.mma_pairs import (
    fetch_own,
    fetch_visited,
    marks_of,
    own_queries,
    pair_scores,
    store_own,
    tiles_of_keys,
)
from torch_attn.kernels.explicit.softmax import add_columns, online_softmax_update
from torch_attn.kernels.explicit.steps import step_start
from torch_attn.kernels.library.schedule import order_argument
from torch_attn.kernels.library.sequences import num_sequence_tiles
from torch_attn.kernels.library.softmax import LOG2E, add_sink, row_statistics
from torch_attn.kernels.library.tiles import count_tiles, head_base
from torch_attn.kernels.tile_lists import listed_argument, listed_mask
from torch_attn.launch import UNSPECIALIZED, KernelCall, Prepared, flash_arguments, launch
from twin_attention.contract.operands import AttentionOperands
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import Backend
from twin_attention.targets.sm80 import PROGRAMS_OF_SM


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def flash_fwd_kernel(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, lse_ptr, mask, strides, seq_q, seq_kv, diagonal,
    num_sequences, heads_q, rule, window_left, window_right, together, ASYNC: gl.constexpr,
    GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr, NUM_STAGES: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program computes BLOCK_Q rows of one query head; each warp has BLOCK_Q / num_warps rows.

    Operands, mask, loop invariant, accumulation and the row that sees no key: as in the
    portable `flash_fwd_kernel`. Grid: (query tiles · heads · batch), in the order of
    `longest_first`.

    A warp has all keys of its rows, so the running softmax needs no other warp, and p is the left
    operand of p·v in the registers where it was computed.

    NUM_STAGES 1: one tile of k and one of v. v arrives during q·kᵀ, the next k during the softmax
    and p·v. NUM_STAGES 2: two of each, which arrive during the whole step. ASYNC: rows are
    aligned to 16 bytes, see `fetch_tile`.

    Tiles at the edges come first, so that the tile after a full one is full and fetched without a
    mask. Where acc takes most registers they come last: else each full step copies acc.
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
    EDGES_LAST: gl.constexpr = HEAD_DIM_V > 192
    ORDER: gl.constexpr = (0, 2, 1) if EDGES_LAST else (1, -1, -1)

    # Start to fetch the queries and the first keys.
    q_tile = allocate_tile(dtype, 1, BLOCK_Q, HEAD_DIM)
    gl.static_assert(NUM_STAGES <= 2)
    k_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_KV, HEAD_DIM)
    v_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_KV, HEAD_DIM_V)
    fetch_own(q_tile, q_ptr, strides.q, mask, rows, HEAD_DIM, ASYNC)
    start_kv = step_start(0, *tiles, BLOCK_KV, EDGES_LAST)
    fetch_visited(k_tile, 0, k_base, strides.k.row, mask, rows, start_kv, HEAD_DIM, True, ASYNC)
    if NUM_STAGES == 2:
        fetch_visited(
            v_tile, 0, v_base, strides.v.row, mask, rows, start_kv, HEAD_DIM_V, True, ASYNC
        )
    commit()
    q = q_tile
    if Q_IN_REGISTERS:
        wait(0)
        q = load_left(q_tile, HEAD_DIM, layout)

    marks = marks_of(mask, rows)
    m_i = gl.full([BLOCK_Q], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    l_i = add_columns(gl.zeros([BLOCK_Q, BLOCK_KV], gl.float32, layout))
    if sinks_ptr is not None:
        # Start the maximum at the sink, so that acc is not rescaled for it at the end.
        m_i = gl.maximum(m_i, gl.load(sinks_ptr + rows.head) * LOG2E)
    acc = zeros(BLOCK_Q, HEAD_DIM_V, layout)

    # Visit the tiles of keys that these queries see; only tiles at the edges are masked.
    step = 0
    total = tiles.before + tiles.full + tiles.after
    for masked in gl.static_range(ORDER[0], ORDER[1], ORDER[2]):
        for _index in range(count_tiles(tiles.before, tiles.full, tiles.after, masked)):
            step += 1
            # The last step fetches its own tile again, and nobody reads it.
            follow = gl.minimum(step, total - 1)
            next_kv = step_start(follow, *tiles, BLOCK_KV, EDGES_LAST)
            if NUM_STAGES == 1:
                # Wait for the keys; fetch the values.
                slot = 0
                wait(0)
                fetch_visited(
                    v_tile, 0, v_base, strides.v.row, mask, rows, start_kv, HEAD_DIM_V, masked,
                    ASYNC,
                )  # fmt: skip
            else:
                # Wait for the keys and values; fetch the next ones.
                slot = (step & 1) ^ 1
                wait(0)
                fetch_visited(
                    k_tile, slot ^ 1, k_base, strides.k.row, mask, rows, next_kv, HEAD_DIM,
                    masked or EDGES_LAST, ASYNC,
                )  # fmt: skip
                fetch_visited(
                    v_tile, slot ^ 1, v_base, strides.v.row, mask, rows, next_kv, HEAD_DIM_V,
                    masked or EDGES_LAST, ASYNC,
                )  # fmt: skip
            commit()
            # s = scale · q kᵀ
            s = product_scores(q, k_tile, slot, HEAD_DIM, layout)
            if NUM_STAGES == 1:
                # Wait for the values; fetch the next keys.
                wait(0)
                fetch_visited(
                    k_tile, 0, k_base, strides.k.row, mask, rows, next_kv, HEAD_DIM,
                    masked or EDGES_LAST, ASYNC,
                )  # fmt: skip
                commit()
            s, _ = pair_scores(
                s, mask, rows, marks, start_kv, rule, window_left, window_right, masked
            )
            # p = exp(s - max), and rescale what was accumulated
            p, alpha, m_i, l_i = online_softmax_update(s, m_i, l_i, rule.exp2_scale, masked)
            acc = scale_rows(acc, alpha)
            # acc += p v
            acc = add_product(acc, p.to(dtype), v_tile, slot)
            start_kv = next_kv
    wait(0)

    # Reduce the row sums over each quad.
    l_i = gl.convert_layout(gl.sum(l_i, 1), gl.SliceLayout(1, layout))
    if sinks_ptr is not None:
        _alpha, m_i, l_i = add_sink(gl.load(sinks_ptr + rows.head), m_i, l_i)

    # Normalise and store.
    l_safe, lse = row_statistics(m_i, l_i)
    store_own(out_ptr, scale_rows(acc, 1.0 / l_safe), rows, heads_q, HEAD_DIM_V)
    lse_rows = lse_ptr + (rows.batch * heads_q + rows.head) * seq_q + rows.rows
    gl.store(lse_rows, lse, mask=rows.rows < rows.end)


def flash_fwd(
    operands: AttentionOperands[Tensor], spec: AttentionSpec, backend: Backend
) -> tuple[Tensor, Tensor]:
    """Launch `flash_fwd_kernel`; return out and lse as the portable `flash_fwd`, contiguous."""
    q = operands.q
    out = q.new_empty((*q.shape[:-1], spec.head_dim_v))
    lse = q.new_empty((*q.shape[:-3], spec.heads_q, spec.seq_q), dtype=torch.float32)
    tensors = (q, operands.k, operands.v, operands.sinks, out, lse)
    tensors = (*tensors, listed_mask("flash_fwd", operands, spec, backend))
    launch("flash_fwd", flash_fwd_kernel, _prepare, tensors, spec, backend)
    return out, lse


def _prepare(call: KernelCall) -> Prepared:
    spec = call.spec
    q, k, v, *_ = call.layouts
    tiles = num_sequence_tiles(spec, spec.seq_q, call.config.block_q)
    arguments = flash_arguments(spec) | copy_arguments(q=q, k=k, v=v)
    arguments |= order_argument(call, tiles, PROGRAMS_OF_SM) | listed_argument(call, of_keys=True)
    return (tiles * spec.heads_q * spec.batch,), arguments
