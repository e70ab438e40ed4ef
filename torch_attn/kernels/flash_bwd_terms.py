"""Flash attention, backward of the terms added to the scores: sums of ds, recomputed by tile.

The gradient of `relative_bias` is a sum of ds over all pairs of a distance. Tiles of queries and of
keys that start equally far apart have the same distances in the same places: they form a band. A
program adds up the tiles of one band, so that only its sum has to be split by distances. The result
has the same bits every time, and no memory grows with the square of a length.
"""

import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from torch_attn.kernels.library.dropout import dropout_weights
from torch_attn.kernels.library.mask import Mask, mask_argument
from torch_attn.kernels.library.scores import round_operand, visible_scores
from torch_attn.kernels.library.segments import STAYS, VISITED, load_segments, segments_of_batch
from torch_attn.kernels.library.sequences import (
    count_sequence_tiles,
    first_tile,
    rows_of_sequence,
)
from torch_attn.kernels.library.softmax import probabilities
from torch_attn.kernels.library.terms import Terms, added_scores, terms_argument
from torch_attn.kernels.library.tiles import ROW_PADDING, head_base, load_tile, strides_of
from torch_attn.kernels.library.tree import in_branch
from torch_attn.launch import (
    UNSPECIALIZED,
    KernelCall,
    Prepared,
    config_of,
    flash_arguments,
    launch,
    num_sequences,
)
from twin_attention.contract.operands import AttentionOperands
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.bands import Bands, bands_of
from twin_attention.targets.family import Backend, portable_backend
from twin_attention.targets.kernels import FlashConfig


@triton.jit
def score_gradients(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse2_ptr,
    delta_ptr,
    terms,
    mask,
    strides,
    row,
    first_q,
    seq_q,
    first_kv,
    seq_kv,
    batch,
    element,
    head,
    start_q,
    start_kv,
    diagonal,
    rule,
    window_left,
    window_right,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Compute ds [BLOCK_Q, BLOCK_KV] of one tile, in float32: the gradient of scaled scores.

    Args:
        q_ptr ... delta_ptr: as in `flash_bwd_dq_kernel`, as are terms, mask, strides,
            diagonal and rule.
        row: the first row of the head's queries in lse2 and delta.
        first_q, seq_q, first_kv, seq_kv: the first row and the number of the sequence's queries,
            and of its keys.
        batch: batch element of the tensors, 0 with packed sequences.
        element: the batch element, or the packed sequence.
        head: the query head.
        start_q, start_kv: first rows of the tile in the sequence. start_kv may be negative: keys
            before the first do not exist.
    """
    rows = start_q + tl.arange(0, BLOCK_Q)
    key = start_kv + tl.arange(0, BLOCK_KV)
    is_key = (key >= 0) & (key < seq_kv)
    seen = is_key[None, :]
    segment_q, segment_kv, is_query = None, None, None
    if mask.segments is not None:
        segments = segments_of_batch(mask.segments, batch, seq_q, seq_kv, seq_kv)
        segment_q, is_query = load_segments(segments.q, start_q, seq_q, BLOCK_Q, STAYS)
        segment_kv = tl.load(segments.kv + key, mask=is_key, other=VISITED)
        segment_kv = tl.where(segment_kv < 0, VISITED, segment_kv)
        is_key &= segment_kv >= 0
    # s = scale · q kᵀ
    q_base = head_base(q_ptr, strides.q, batch, head)
    k_base = head_base(k_ptr, strides.k, batch, head // GROUP_SIZE, first_kv)
    row_q, end_q = first_q + start_q, first_q + seq_q
    q = load_tile(q_base, row_q, end_q, strides.q.row, BLOCK_Q, HEAD_DIM, True, is_query)
    k = load_tile(k_base, start_kv, seq_kv, strides.k.row, BLOCK_KV, HEAD_DIM, True, is_key)
    q, k = round_operand(q, rule.precision), round_operand(k, rule.precision)
    position = rows + diagonal
    if mask.tree is not None:
        own_q, own_kv = first_q + batch * seq_q, first_kv + batch * seq_kv
        seen &= in_branch(
            mask.tree, mask.depths, own_q, rows[:, None], seq_q, own_kv,
            tl.maximum(key, 0)[None, :], seq_kv, position[:, None],
        )  # fmt: skip
    offset = start_kv - start_q - diagonal
    added = added_scores(
        terms, element, head, offset, start_q, start_kv, seq_q, seq_kv, BLOCK_Q, BLOCK_KV, True
    )
    s, dcap = visible_scores(
        q, k, position[:, None], key[None, :], None, rule, window_left, window_right, True,
        segment_q, segment_kv, seen, added,
    )  # fmt: skip
    # p = exp(s - lse)
    lse2 = tl.load(lse2_ptr + row + rows)
    rest2 = tl.load(terms.rest2 + row + rows)
    p = probabilities(s, lse2[:, None], rest2[:, None], rule.exp2_scale)
    # dp = dout vᵀ
    do_base = head_base(dout_ptr, strides.dout, batch, head)
    v_base = head_base(v_ptr, strides.v, batch, head // GROUP_SIZE, first_kv)
    do = load_tile(do_base, row_q, end_q, strides.dout.row, BLOCK_Q, HEAD_DIM_V, True, is_query)
    v = load_tile(v_base, start_kv, seq_kv, strides.v.row, BLOCK_KV, HEAD_DIM_V, True, is_key)
    do, v = round_operand(do, rule.precision), round_operand(v, rule.precision)
    dp = tl.dot(do, tl.trans(v), input_precision=rule.precision)
    kept = dropout_weights(
        terms, element, head, start_q, start_kv, BLOCK_Q, BLOCK_KV, ANY_START=True
    )
    if kept is not None:
        dp = dp * kept
    # ds = p ∘ (dp - delta) ∘ dcap
    delta = tl.load(delta_ptr + row + rows)
    return p * (dp - delta[:, None]) * dcap


@triton.jit(do_not_specialize=UNSPECIALIZED)
def flash_bwd_relative_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse2_ptr,
    delta_ptr,
    tiles_ptr,
    sums_ptr,
    terms,
    mask,
    strides,
    bands,
    elements,
    seq_q,
    seq_kv,
    diagonal,
    num_sequences,
    heads_q,
    rule,
    window_left,
    window_right,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """One program adds up ds over the tiles of one band of one query head.

    Operands: q, k, v, dout, lse2 and delta as in `flash_bwd_dq_kernel`; tiles [Hq, near, BLOCK_Q,
    BLOCK_KV] float32, the sums of the near bands; sums [Hq, bands] float32, the sums over all pairs
    of the other bands. Grid: (bands, heads) in one axis, bands fastest. bands:
    `twin_attention.targets.bands.Bands`; elements: how many batch elements, or packed sequences.
    Terms, mask, diagonal, rule: as in `flash_bwd_dq_kernel`. Loop invariant: acc is Σ ds over the
    tiles so far. Accumulation: float32.
    """
    band, head = tl.program_id(0) % bands.count, tl.program_id(0) // bands.count
    # How far after its queries' positions a band's keys start.
    offset = (bands.first + band) * BLOCK_KV
    acc = tl.zeros([BLOCK_Q, BLOCK_KV], tl.float32)
    is_visible = band >= 0
    if window_left is not None:
        is_visible &= offset + BLOCK_KV > -window_left
    if window_right is not None:
        is_visible &= offset - BLOCK_Q < window_right
    padded = count_sequence_tiles(seq_q, num_sequences, ROW_PADDING) * ROW_PADDING
    for element in tl.range(0, elements):
        batch = tl.cast(element, tl.int64)
        first_q, first_kv, size_q, size_kv, own_diagonal = 0, 0, seq_q, seq_kv, diagonal
        row = (batch * heads_q + head) * padded
        if num_sequences is not None:
            first_q, size_q = rows_of_sequence(mask.offsets.q, element, seq_q, num_sequences, seq_q)
            first_kv, size_kv = rows_of_sequence(mask.offsets.kv, element, seq_kv, num_sequences, 0)
            batch, own_diagonal = tl.cast(0, tl.int64), size_kv - size_q
            tile = first_tile(first_q, element, ROW_PADDING)
            row = head.to(tl.int64) * padded + tile.to(tl.int64) * ROW_PADDING
        first = tl.cast(first_kv, tl.int32)
        # Visit tiles of queries, from the first to the last whose keys in the band exist.
        before = offset + own_diagonal
        begin = tl.maximum(-(before + BLOCK_KV - 1), 0) // BLOCK_Q
        end = tl.minimum(
            tl.cdiv(tl.maximum(size_kv - before, 0), BLOCK_Q), tl.cdiv(size_q, BLOCK_Q)
        )
        count = tl.where(is_visible, tl.maximum(end - begin, 0), 0)
        for step in tl.range(0, count):
            start_q = (begin + step) * BLOCK_Q
            acc += score_gradients(
                q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, terms, mask, strides, row,
                first_q, size_q, first, size_kv, batch, element, head, start_q, start_q + before,
                own_diagonal, rule, window_left, window_right, GROUP_SIZE, HEAD_DIM, HEAD_DIM_V,
                BLOCK_Q, BLOCK_KV,
            )  # fmt: skip

    # Store the band: its tile if its distances have entries of their own, otherwise its sum.
    near = band - bands.near
    total = tl.sum(tl.sum(acc, 1), 0)
    if (near >= 0) & (near < bands.num_near):
        rows = tl.arange(0, BLOCK_Q)[:, None]
        cols = tl.arange(0, BLOCK_KV)[None, :]
        tile = tiles_ptr + (head.to(tl.int64) * bands.num_near + near) * (BLOCK_Q * BLOCK_KV)
        tl.store(tile + rows * BLOCK_KV + cols, acc)
        total = 0.0
    tl.store(sums_ptr + head * bands.count + band, total)


def relative_gradient(
    operands: AttentionOperands[Tensor],
    inputs: tuple[Tensor, ...],
    terms: Terms,
    mask: Mask,
    spec: AttentionSpec,
    backend: Backend,
) -> dict[str, Tensor]:
    """Compute the gradient of `relative_bias`, by name; empty without it.

    Args:
        operands: operands of the call.
        inputs: q, k, v, dout, lse2 and delta.
        terms, mask: as the kernel of dq takes them.
        spec, backend: the problem, and what runs.
    """
    table = getattr(operands, "relative_bias", None)
    if table is None:
        return {}
    portable = portable_backend("torch_attn", backend.target)
    config = config_of("flash_bwd_dq", spec, portable, table.device)
    assert isinstance(config, FlashConfig)
    bands = bands_of(spec, table.shape[1] // 2, config.block_q, config.block_kv)
    shape = (spec.heads_q, bands.num_near, config.block_q, config.block_kv)
    tiles = inputs[-1].new_empty(shape)
    sums = inputs[-1].new_empty((spec.heads_q, bands.count))
    tensors = (*inputs, tiles, sums, terms, mask)
    launch(
        "flash_bwd_dq", flash_bwd_relative_kernel, _prepare, tensors, spec, portable, bands,
        **compiler_numbers(spec),
    )  # fmt: skip
    return {"relative_bias": sums_of_distances(tiles, sums, bands).to(table.dtype)}


def _prepare(call: KernelCall) -> Prepared:
    """Return the grid and the arguments of `flash_bwd_relative_kernel`."""
    spec, (bands,) = call.spec, call.constants
    q, k, v, dout, _, _, tiles, *_ = call.layouts
    assert isinstance(call.config, FlashConfig)
    assert tiles.shape[2:] == (call.config.block_q, call.config.block_kv)
    arguments = flash_arguments(spec) | terms_argument(call) | mask_argument(call, of_keys=True)
    arguments["strides"] = strides_of(q=q, k=k, v=v, dout=dout)
    arguments["bands"] = bands
    arguments["elements"] = spec.batch if num_sequences(spec) is None else num_sequences(spec)
    return (bands.count * spec.heads_q,), arguments


def compiler_numbers(spec: AttentionSpec) -> dict[str, int]:
    """Return the warps and stages that replace those of the dq kernel.

    Four tiles are loaded in each step, and no accumulator is as wide as a head.
    """
    size = max(spec.head_dim, spec.head_dim_v)
    return {"num_warps": 8, "num_stages": 2 if spec.dtype_bits == 16 and size <= 128 else 1}


def sums_of_distances(tiles: Tensor, sums: Tensor, bands: Bands) -> Tensor:
    """Return the sums over each clipped distance [Hq, 2R + 1] from the sums of the bands."""
    heads, near, block_q, block_kv = tiles.shape
    # Row i of a tile, counted from the last query, moves i columns to the right.
    skewed = pad(tiles.flip(2), (0, block_q)).flatten(2)[..., :-block_q]
    width = block_q + block_kv - 1
    of_bands = skewed.unflatten(2, (block_q, width)).sum(2)
    # A band begins block_kv distances after the previous one: bands `every` apart do not overlap.
    every = -(-width // block_kv)
    found = tiles.new_zeros((heads, (near + every) * block_kv))
    for n in range(every):
        apart = pad(of_bands[:, n::every], (0, every * block_kv - width)).flatten(1)
        found = found + pad(apart, (n * block_kv, found.shape[1] - n * block_kv - apart.shape[1]))
    if bands.radius == 0:
        return (sums.sum(1) + found.sum(1))[:, None]
    # `found` begins with this distance.
    first = (bands.first + bands.near) * block_kv - block_q + 1
    begin, end = 1 - bands.reach - first, bands.reach - first
    before = sums[:, : bands.near].sum(1) + found[:, :begin].sum(1)
    behind = sums[:, bands.near + near :].sum(1) + found[:, end:].sum(1)
    last = 2 * bands.radius
    between = 1 + bands.radius - bands.reach
    # Pad and add: a replay takes no lists of tensors, which a concatenation needs.
    ends = pad(before[:, None], (0, last)) + pad(behind[:, None], (last, 0))
    return ends + pad(found[:, begin:end], (between, between))
