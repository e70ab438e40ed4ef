"""Flash attention, forward, for SM90: the formula of `torch_attn.kernels.portable.flash_fwd`.

This file spells out what the compiler decides there: which warp loads, which compute, what each
waits for, and which products overlap which softmax. Shah et al. 2024, FlashAttention-3, algorithms
1 and 2.
"""

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from torch_attn.kernels.explicit.barriers import MAX_STAGES, allocate_barriers
from torch_attn.kernels.explicit.items import Problem, allocate_hand_over, are_counted, item_counter
from torch_attn.kernels.explicit.terms import allocate_bias_boxes, bias_boxes
from torch_attn.kernels.explicit.tma import allocate_tile, maps_of, stored_maps_of
from torch_attn.kernels.library.terms import terms_argument, terms_of
from torch_attn.kernels.sm90.flash_fwd_consumer import Kernel, consume
from torch_attn.kernels.sm90.flash_fwd_producer import produce_keys
from torch_attn.kernels.sm90.flash_fwd_rows import Results
from torch_attn.kernels.sm90.halves import allocate_halves, first_columns
from torch_attn.kernels.sm90.work import persistent_queries
from torch_attn.kernels.tile_lists import listed_mask
from torch_attn.launch import UNSPECIALIZED, KernelCall, Prepared, launch, rule_argument
from torch_attn.targets import num_sms
from twin_attention.contract.operands import AttentionOperands
from twin_attention.contract.spec import AttentionSpec, PartialSpec, ScoreRule
from twin_attention.targets import sm90
from twin_attention.targets.family import Backend
from twin_attention.targets.kernels import SpecializedConfig
from twin_attention.targets.steps import steps_of_queries
from twin_attention.targets.target import SHARED_MEMORY_LIMIT

# Up to this head size the first product of the next item is issued ahead; above, that is slower.
AHEAD_HEAD_DIM = 96
# By the largest head dimension: from this many steps in its longest tile on, a dense problem takes
# uneven tiles from a counter.
COUNTED_STEPS = {128: 64, 256: 32, 512: 32}


@gluon.jit(do_not_specialize=[*UNSPECIALIZED, "num_items"])
def flash_fwd_kernel(
    q, k, v, sinks_ptr, results, counter_ptr, terms, mask, seq_q, seq_kv, diagonal, num_sequences,
    heads_q, rule, window_left, window_right, num_items, together, GROUP_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_KV: gl.constexpr,
    NUM_STAGES: gl.constexpr, PING_PONG: gl.constexpr, EDGES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """One program computes tiles of BLOCK_Q rows of query heads, one after the other.

    BLOCK_Q / 64 consumer warpgroups have 64 rows each (docs/reading-the-twins.md). If out has more
    than 256 columns, there is one, and another for the rest of the columns (`halves`).
    PING_PONG: the consumers issue in turn; at 2, only the first waits for tiles of keys and values
    in the main loop.

    q, k, v and out are TMA descriptors of [B, H, S, D], one for each column piece. Mask, loop
    invariant, accumulation and the row that sees no key: as in the portable `flash_fwd_kernel`. A
    carry and lse are the result over other keys, to which these are added where lse is finite.
    Where out is the carry's memory, and without sinks, a tile without keys is passed over. With a
    wide acc (`rescales_on_demand`), m_i is at most RESCALE_ABOVE below the row maximum so far.
    Packed tensors are a batch of one, and out is a pointer.

    Args:
        num_items: tiles of queries of all heads, one item each.
        together: see `head_and_tile`.
        EDGES: some tile of keys needs a mask.
        counter_ptr: [1], zero at first, from which the producer takes items (`next_item`). None
            where programs take turns, and where tiles are listed.
        AHEAD: the first q·kᵀ of an item is issued with the last p·v of the previous item, for which
            shared memory has two tiles of queries.
    """
    dtype: gl.constexpr = q[0].dtype
    OUT: gl.constexpr = results.place
    NUM_CONSUMERS: gl.constexpr = BLOCK_Q // 64
    gl.static_assert(NUM_STAGES <= MAX_STAGES)
    NUM_TILES_Q: gl.constexpr = (2 if AHEAD else 1) * NUM_CONSUMERS
    q_tile = allocate_tile(dtype, NUM_TILES_Q, 64, HEAD_DIM)
    k_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_KV, HEAD_DIM)
    v_tile = allocate_tile(dtype, NUM_STAGES, BLOCK_KV, HEAD_DIM_V)
    out_tile = q_tile
    if OUT == "staged":
        out_tile = allocate_tile(dtype, NUM_CONSUMERS, 64, HEAD_DIM_V)
    elif OUT == "in sums":
        out_tile = allocate_tile(dtype, 2 * NUM_CONSUMERS, 64, HEAD_DIM_V)
    bias_tile = q_tile
    if terms.bias.boxes is not None:
        bias_tile = allocate_bias_boxes(terms.bias.boxes, NUM_STAGES, BLOCK_Q, BLOCK_KV)
    q_full = allocate_barriers(NUM_TILES_Q)
    HALVES: gl.constexpr = 1 if first_columns(HEAD_DIM_V) < HEAD_DIM_V else 0
    q_read = allocate_barriers(NUM_TILES_Q + HALVES)
    k_full = allocate_barriers(NUM_STAGES)
    v_full = allocate_barriers(NUM_STAGES)
    fence_async_shared()

    tiles = (q_tile, k_tile, v_tile, out_tile, bias_tile)
    barriers = (q_full, q_read, k_full, v_full)
    shared, carried = (), ()
    if are_counted(num_sequences, mask.tiles) or counter_ptr is not None:
        shared = allocate_hand_over(NUM_CONSUMERS + HALVES, mask.tiles is not None, 2)
    if results.carry is not None:
        carried = (results.carry,)
    halves = None
    if HALVES:
        halves = allocate_halves(dtype, BLOCK_KV)
    problem = Problem(
        seq_q, seq_kv, diagonal, heads_q, num_items, together, mask.offsets.q, mask.offsets.kv,
        num_sequences, mask.segments, mask.tree, mask.depths, mask.tiles, mask.intervals,
    )  # fmt: skip
    # Variables would turn constants into tensors. The last partition loads.
    gl.warp_specialize(
        [
            (consume, (
                Kernel(
                    tiles, barriers, shared, results, terms, problem, rule, window_left,
                    window_right, sinks_ptr, mask.lists, mask.q_ranges, halves, BLOCK_Q, HEAD_DIM,
                    HEAD_DIM_V, PING_PONG, EDGES, AHEAD,
                ),
                part,
            ))
            if part < NUM_CONSUMERS + HALVES
            else (produce_keys, (
                tiles, barriers, shared, counter_ptr, (q, k, v), terms.bias, carried, problem,
                window_left, window_right, mask.lists, BLOCK_Q, GROUP_SIZE, HEAD_DIM, HEAD_DIM_V,
                sinks_ptr is None and OUT == "part" and results.carry is not None,
                OUT == "in sums",
            ))
            for part in ((0, 1, 2) if NUM_CONSUMERS < 3 else (0, 1, 2, 3))
        ],
        [4, 1] if NUM_CONSUMERS < 3 else [4, 4, 1],
        [240, 24] if NUM_CONSUMERS < 3 else [160, 160, 24],
    )  # fmt: skip


def flash_fwd(
    operands: AttentionOperands[Tensor], spec: AttentionSpec, backend: Backend
) -> tuple[Tensor, ...]:
    """Return out, lse, and all that the portable `flash_fwd` returns, contiguous."""
    q = operands.q
    out = q.new_empty((*q.shape[:-1], spec.head_dim_v))
    lse = q.new_empty((*q.shape[:-3], spec.heads_q, spec.seq_q), dtype=torch.float32)
    rest, row_max = (
        lse.new_empty(lse.shape) if is_result else None for is_result in (spec.terms, spec.row_max)
    )
    launch_forward(operands, Results(out, lse, row_max, None, rest=rest), spec, backend)
    return tuple(x for x in (out, lse, rest, row_max) if x is not None)


def launch_forward(
    operands: AttentionOperands[Tensor], results: Results, spec: AttentionSpec, backend: Backend
) -> None:
    q = operands.q
    counter = item_counter(q, spec, is_counted("flash_fwd", spec, backend, q.device))
    tensors = (q, operands.k, operands.v, operands.sinks, results, counter)
    mask = listed_mask("flash_fwd", operands, spec, backend)
    tensors = (*tensors, terms_of(operands, spec), mask)
    # One consumer; Triton adds the other partitions' warps.
    launch("flash_fwd", flash_fwd_kernel, _prepare, tensors, spec, backend, num_warps=4)


def _prepare(call: KernelCall) -> Prepared:
    spec, config = call.spec, call.config
    assert isinstance(spec, AttentionSpec)
    assert isinstance(config, SpecializedConfig)
    q, k, v, _sinks, results, counter, *_ = call.layouts
    terms = terms_argument(call)["terms"]
    boxes = bias_boxes(terms.bias, config.block_q, config.block_kv)
    size_of_bias = 0
    if boxes is not None:
        tile = config.block_q * config.block_kv * terms.bias.entries.dtype.itemsize
        size_of_bias = config.num_stages * tile
        if not _room_for(spec, config, 1, size_of_bias, out_in_q=_columns_agree(spec)):
            boxes, size_of_bias = None, 0
    arguments = {
        "rule": rule_argument(_rule_of(spec)),
        "q": maps_of(q, 64),
        "k": maps_of(k, config.block_kv),
        "v": maps_of(v, config.block_kv),
        "results": results._replace(
            out=stored_maps_of(spec, results.out, 64),
            place=tl.constexpr(_place_of_out(spec, config, size_of_bias)),
        ),
        "terms": terms._replace(bias=terms.bias._replace(boxes=boxes)),
        # A consumer reads a tile of the bias when it has the item's rows.
        "AHEAD": max(spec.head_dim, spec.head_dim_v) <= AHEAD_HEAD_DIM
        and boxes is None
        and _room_for(spec, config, 2),
    }
    return persistent_queries(call, arguments, counter is not None)


def is_counted(kernel: str, spec: AttentionSpec, backend: Backend, device: torch.device) -> bool:
    """Return True if tiles of a dense problem are so long and uneven that a counter pays."""
    config = backend.configs(spec)[kernel]
    steps = steps_of_queries(spec, config.block_q, config.block_kv)
    items = len(steps) * spec.heads_q * spec.batch
    size = max(spec.head_dim, spec.head_dim_v)
    least = next(count for largest, count in COUNTED_STEPS.items() if size <= largest)
    return max(steps) >= least and items > num_sms(device, backend.target)


def _rule_of(spec: AttentionSpec) -> ScoreRule:
    """Return the rule from q·k to the exponent, which scales where terms can be divided by that."""
    divides = 2.0**-60 <= spec.scale <= 2.0**60
    scale_first = bool(spec.terms) and not divides
    return ScoreRule.of(spec.scale, spec.softcap, scale_first, spec.precision)


def _room_for(
    spec: AttentionSpec,
    config: SpecializedConfig,
    tiles_q: int,
    size_of_bias: int = 0,
    out_in_q: bool = False,
) -> bool:
    columns, columns_v = (sum(sm90.column_pieces(d)) for d in (spec.head_dim, spec.head_dim_v))
    keys = config.num_stages * config.block_kv
    rows = keys + tiles_q * config.block_q
    tiles_of_out = 0 if out_in_q else 2 if spec.batch_invariant else 1
    rows_v = keys + tiles_of_out * config.block_q
    size = 2 * (columns * rows + columns_v * rows_v) + size_of_bias + 1024
    if sm90.first_columns(spec.head_dim_v) < spec.head_dim_v:
        size += 64 * (2 * config.block_kv + 4)  # of `Halves`
    return size <= SHARED_MEMORY_LIMIT["sm90"]


def _columns_agree(spec: AttentionSpec) -> bool:
    """Return True if out's tile may lie where the queries were."""
    columns, columns_v = (sum(sm90.column_pieces(d)) for d in (spec.head_dim, spec.head_dim_v))
    return columns == columns_v


def _place_of_out(spec: AttentionSpec, config: SpecializedConfig, size_of_bias: int) -> str:
    if isinstance(spec, PartialSpec) and not spec.last:
        return "part"
    if spec.batch_invariant:
        return "in sums"
    staged = not _columns_agree(spec) or _room_for(spec, config, 1, size_of_bias)
    return "staged" if staged else "in q"
