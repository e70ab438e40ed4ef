"""dk and dv of the backward for SM90, and optionally dq's sums."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from torch_attn.kernels.explicit.barriers import MAX_DO_STAGES, MAX_Q_STAGES, allocate_barriers
from torch_attn.kernels.explicit.items import Problem, allocate_hand_over, are_counted
from torch_attn.kernels.explicit.sections import divide_heads, unfinished_sections
from torch_attn.kernels.explicit.terms import allocate_bias_boxes, bias_boxes
from torch_attn.kernels.explicit.tma import (
    allocate_row,
    allocate_tile,
    column_pieces,
    maps_of,
    row_map,
    rows_map,
    stored_maps_of,
)
from torch_attn.kernels.library.terms import Bias, terms_argument
from torch_attn.kernels.sm90.flash_bwd_dkdv_adder import add_queries
from torch_attn.kernels.sm90.flash_bwd_dkdv_consumer import Gradients, consume_queries
from torch_attn.kernels.sm90.flash_bwd_dkdv_passes import (
    allocate_staging,
    map_converted,
    run_passes,
)
from torch_attn.kernels.sm90.flash_bwd_dkdv_rows import map_rows
from torch_attn.kernels.sm90.queries import (
    Barriers,
    Kernel,
    SharedTiles,
    persistent_keys,
    produce_queries,
)
from torch_attn.kernels.sm90.sums import allocate_dq, allocate_ds, map_sums
from torch_attn.launch import UNSPECIALIZED, KernelCall, Prepared
from twin_attention.contract.spec import VarlenSpec

BLOCK_Q = gl.constexpr(64)


@triton.constexpr_function
def kv_stages(head_dim, head_dim_v, adds_dq, loads_bias):
    """Return for how many items shared memory holds k and v; with two, the next arrive early."""
    columns = sum(column_pieces(head_dim)) + sum(column_pieces(head_dim_v))
    return 2 if columns <= (128 if adds_dq or loads_bias else 256) else 1


@gluon.jit(do_not_specialize=[*UNSPECIALIZED, "num_items"])
def flash_bwd_dkdv_kernel(
    q, k, v, dout, lse2, delta, dk, dv, counter_ptr, sums, terms, mask, seq_q, seq_kv, diagonal,
    num_sequences, heads_q, rule, window_left, window_right, num_items, together,
    GROUP_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr,
    NUM_STAGES: gl.constexpr, EDGES: gl.constexpr,
):  # fmt: skip
    """One program computes tiles of 128 rows of dk and dv, one after the other.

    A producer warp loads with TMA; two consumer warpgroups have 64 keys each and visit the tiles of
    BLOCK_Q queries (`consume_queries`). Operands, loop invariant and accumulation: as in the
    portable `flash_bwd_dkdv_kernel`.

    sums.dq: None, or dq's float32 sums in the order of `write_dq`, with passes only of heads that
    have a place (`Sections`). A fourth partition of one warp adds the consumers' ds·k.

    sums.passes: what a fifth partition of one warp reads and writes (`run_passes`). Without its dq
    there is none, and the sums are 0 at first. With its rows, lse2 and delta are results.

    sums.dk, sums.dv: None, and an item visits all query heads of a GQA group; or sums
    [B, Hkv, rows] in the same order, and it visits one: programs share a tile of keys, except in
    packed sequences.

    With intervals in the mask, dk and dv are float32, passed as pointers. counter_ptr: as in
    `flash_fwd_kernel`; with passes the counts of `divide_heads` follow it.
    """
    dtype: gl.constexpr = q[0].dtype
    MEMBERS: gl.constexpr = GROUP_SIZE if sums.dk is None else 1
    PARTS: gl.constexpr = 3 if sums.dq is None else 4 if sums.passes.dq is None else 5
    gl.static_assert(NUM_STAGES <= MAX_DO_STAGES)
    gl.static_assert(NUM_STAGES + 1 <= MAX_Q_STAGES)
    if num_sequences is not None:
        # The next tile of queries is awaited, to be cleared, before this one is released.
        gl.static_assert(NUM_STAGES == 2)
    KV_STAGES: gl.constexpr = kv_stages(
        HEAD_DIM, HEAD_DIM_V, sums.dq is not None, terms.bias.boxes is not None
    )
    k_tile = allocate_tile(dtype, 2 * KV_STAGES, 64, HEAD_DIM)
    v_tile = allocate_tile(dtype, 2 * KV_STAGES, 64, HEAD_DIM_V)
    q_tile = allocate_tile(dtype, NUM_STAGES + 1, BLOCK_Q, HEAD_DIM)
    do_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_Q, HEAD_DIM_V)
    lse2_row = allocate_row(NUM_STAGES + 1, BLOCK_Q)
    delta_row = allocate_row(NUM_STAGES, BLOCK_Q)
    bias_tile, ds_buffer = (), lse2_row
    if terms.bias.boxes is not None:
        bias_tile = allocate_bias_boxes(terms.bias.boxes, 2, BLOCK_Q, 64)
    dq_tiles, staging = ((), ()), ()
    if sums.dq is not None:
        ds_buffer = allocate_ds(dtype, BLOCK_Q, terms.dbias.boxes is not None)
        dq_tiles = (allocate_dq(0, HEAD_DIM), allocate_dq(1, HEAD_DIM))
    if sums.passes.dq is not None:
        staging = allocate_staging(dtype)
    k_full = allocate_barriers(KV_STAGES)
    v_full = allocate_barriers(KV_STAGES)
    kv_read = allocate_barriers(2 * KV_STAGES)
    q_full = allocate_barriers(NUM_STAGES + 1)
    do_full = allocate_barriers(NUM_STAGES)
    fence_async_shared()

    rest2_row = ()
    if terms.rest2 is not None:
        rest2_row = (allocate_row(NUM_STAGES + 1, BLOCK_Q),)
    tiles = SharedTiles(k_tile, v_tile, q_tile, do_tile, lse2_row, delta_row, bias_tile, rest2_row)
    of_dq = (ds_buffer, dq_tiles)
    barriers = Barriers(k_full, v_full, kv_read, q_full, do_full)
    shared = ()
    if are_counted(num_sequences, mask.tiles) or counter_ptr is not None:
        listed: gl.constexpr = mask.tiles is not None
        shared = allocate_hand_over(2 if sums.dq is None else 3, listed)
    problem = Problem(
        seq_kv, seq_q, diagonal, heads_q, num_items, together, mask.offsets.kv, mask.offsets.q,
        num_sequences, mask.segments, mask.tree, mask.depths, mask.tiles, mask.intervals,
        terms.dbias.adds,
    )  # fmt: skip
    sections = ()
    if sums.passes.dq is not None:
        counted: gl.constexpr = are_counted(num_sequences, mask.tiles)
        unfinished: gl.constexpr = unfinished_sections(counted or mask.intervals is not None)
        sections = divide_heads(counter_ptr, problem, unfinished, MEMBERS)
    # As in `flash_fwd_kernel`. The last partitions load, add dq, do the passes.
    gl.warp_specialize(
        [
            (consume_queries, (
                Kernel(
                    tiles, barriers, shared,
                    Gradients(ds_buffer, dq_tiles, dk, dv, sums.dk, sums.dv), problem, rule, terms,
                    window_left, window_right, mask.q_ranges, GROUP_SIZE, MEMBERS,
                    sums.dq is not None, HEAD_DIM, HEAD_DIM_V, EDGES,
                ),
                part,
            ))
            if part < 2
            else (produce_queries, (
                tiles, barriers, shared, counter_ptr, sections,
                SharedTiles(k, v, q, dout, lse2, delta, terms.bias, terms.rest2), problem,
                window_left, window_right,
                sums.dq is not None, GROUP_SIZE, MEMBERS, HEAD_DIM, HEAD_DIM_V,
            ))
            if part == 2
            else (add_queries, (
                of_dq, shared, sections, problem, window_left, window_right, sums.dq,
                terms.dbias.boxes, terms.dbias.adds, BLOCK_Q, MEMBERS, HEAD_DIM,
            ))
            if part == 3
            else (run_passes, (
                staging, sums.dq, sums.passes, sections, problem, rule.scale, MEMBERS, HEAD_DIM,
                HEAD_DIM_V,
            ))
            for part in (
                (0, 1, 2) if PARTS == 3 else (0, 1, 2, 3) if PARTS == 4 else (0, 1, 2, 3, 4)
            )
        ],
        [4, 1] if PARTS == 3 else [4, 1, 1] if PARTS == 4 else [4, 1, 1, 1],
        [240, 24] if PARTS == 3 else [240, 24, 24] if PARTS == 4 else [240, 24, 24, 24],
    )  # fmt: skip


def prepare_dkdv(call: KernelCall) -> Prepared:
    spec, config = call.spec, call.config
    assert (config.block_q, config.block_kv) == (BLOCK_Q.value, 128)
    q, k, v, dout, lse2, delta, dk, dv, counter, sums, *_ = call.layouts
    terms = terms_argument(call)["terms"]
    boxes, stored = (bias_boxes(x, config.block_q, 64) for x in (terms.bias, terms.dbias))
    if boxes is not None and terms.bias.entries.dtype.itemsize != 2:
        # Shared memory has no room besides heads of 128.
        boxes = None
    adds = None if stored is None else tl.constexpr(terms.dbias.entries.shape[0] < spec.batch)
    # Only TMA stores the gradient: a pointer to it would be one more address of a result.
    dbias = Bias(boxes=stored, adds=adds)
    rest2 = rows_map(terms.rest2, config.block_q)
    terms = terms._replace(bias=terms.bias._replace(boxes=boxes), dbias=dbias, rest2=rest2)
    ragged = sums.dq is not None and spec.seq_kv % config.block_kv != 0
    members = spec.group_size if sums.dk is None else 1
    has_passes = sums.passes.dq is not None
    if sums.dq is not None:
        is_packed = isinstance(spec, VarlenSpec)
        passes = sums.passes
        if has_passes:
            rows = passes.dq if is_packed else None
            passes = passes._replace(dq=map_converted(passes.dq), dq_rows=rows)
            if passes.out is not None:
                passes = passes._replace(dout=map_rows(passes.dout), out=map_rows(passes.out))
        sums = sums._replace(dq=map_sums(sums.dq), passes=passes)
    # With dq there are no registers for both descriptors and pointers.
    by_rows = sums.dq is not None and max(spec.head_dim, spec.head_dim_v) > 64
    arguments = {
        "q": maps_of(q, config.block_q),
        "k": maps_of(k, 64),
        "v": maps_of(v, 64),
        "dout": maps_of(dout, config.block_q),
        "lse2": row_map(lse2, config.block_q),
        "delta": row_map(delta, config.block_q),
        "dk": stored_maps_of(spec, dk, 64, by_rows),
        "dv": stored_maps_of(spec, dv, 64, by_rows),
        "sums": sums,
        "terms": terms,
    }
    return persistent_keys(call, members, arguments, ragged, counter is not None, has_passes)
