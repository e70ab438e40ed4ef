"""Flash attention, backward of the terms added to the scores: sums of ds, recomputed by tile.

The gradient of `relative_bias` is a sum of ds over all pairs of a distance. Tiles whose queries and
keys start equally far apart form a band: they have the same distances in the same places. A program
adds up one band: the same bits every time, and no memory that grows with the square of a length.
"""

import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from torch_attn.kernels.library.dropout import kept_pairs
from torch_attn.kernels.library.mask import Mask, mask_argument
from torch_attn.kernels.library.pairs.rows import load_own, rows_at
from torch_attn.kernels.library.pairs.scores import pair_scores
from torch_attn.kernels.library.pairs.visits import load_keys, load_values
from torch_attn.kernels.library.sequences import padded_row, rows_of_sequence
from torch_attn.kernels.library.softmax import load_lse, probabilities
from torch_attn.kernels.library.terms import Terms, terms_argument
from torch_attn.kernels.library.tiles import head_base, strides_of
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
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, terms, mask, strides, rows, row, start_kv,
    rule, window_left, window_right, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Compute ds [BLOCK_Q, BLOCK_KV] of one tile in float32; start_kv may be negative."""
    q = load_own(q_ptr, strides.q, mask, rows, rule, HEAD_DIM)
    # s = scale · q kᵀ
    k_base = head_base(k_ptr, strides.k, rows.batch, rows.head // GROUP_SIZE, rows.first_other)
    k, keys = load_keys(
        k_base, strides.k.row, mask, rows, start_kv, rule, BLOCK_KV, HEAD_DIM, True, True
    )
    s, dcap = pair_scores(
        q, k, mask, terms, rule, rows, keys, window_left, window_right, True, ANY_START=True
    )
    # p = exp(s - lse)
    row -= rows.first
    lse2, rest2 = load_lse(lse2_ptr, terms, row, rows.rows)
    p = probabilities(s, lse2, rest2, terms, rule.exp2_scale)
    # dp = dout vᵀ
    do = load_own(dout_ptr, strides.dout, mask, rows, rule, HEAD_DIM_V)
    v_base = head_base(v_ptr, strides.v, rows.batch, rows.head // GROUP_SIZE, rows.first_other)
    v = load_values(v_base, strides.v.row, mask, keys, rule, HEAD_DIM_V, True, True)
    dp = tl.dot(do, tl.trans(v), input_precision=rule.precision)
    dp = dp * kept_pairs(terms, rows, keys, ANY_START=True)
    # ds = p ∘ (dp - delta) ∘ dcap
    delta = tl.load(delta_ptr + row + rows.rows)
    return p * (dp - delta[:, None]) * dcap


@triton.jit(do_not_specialize=UNSPECIALIZED)
def flash_bwd_relative_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, tiles_ptr, sums_ptr, terms, mask, strides,
    bands, elements, seq_q, seq_kv, diagonal, num_sequences, heads_q, rule, window_left,
    window_right, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """One program adds up ds over the tiles of one band of one query head.

    Operands: as in `flash_bwd_dq_kernel`; tiles [Hq, near, BLOCK_Q, BLOCK_KV] float32, the sums of
    the near bands; sums [Hq, bands] float32, of the others; `twin_attention.targets.bands.Bands`.
    Grid: (bands, heads) in one axis, bands fastest. elements: batch elements, or packed sequences.
    Loop invariant: acc is Σ ds over the tiles so far. Accumulation: float32.
    """
    band, head = tl.program_id(0) % bands.count, tl.program_id(0) // bands.count
    # How far after its queries a band's keys start.
    offset = (bands.first + band) * BLOCK_KV
    acc = tl.zeros([BLOCK_Q, BLOCK_KV], tl.float32)
    is_visible = band >= 0
    if window_left is not None and mask.q_ranges is None:
        is_visible &= offset + BLOCK_KV > -window_left
    if window_right is not None and mask.q_ranges is None:
        is_visible &= offset - BLOCK_Q < window_right
    for element in tl.range(0, elements):
        batch = tl.cast(element, tl.int64)
        first_q, first_kv, size_q, size_kv, own_diagonal = 0, 0, seq_q, seq_kv, diagonal
        if num_sequences is not None:
            first_q, size_q = rows_of_sequence(mask.offsets.q, element, seq_q, num_sequences, seq_q)
            first_kv, size_kv = rows_of_sequence(mask.offsets.kv, element, seq_kv, num_sequences, 0)
            batch, own_diagonal = tl.cast(0, tl.int64), size_kv - size_q
        row = padded_row(batch * heads_q + head, seq_q, num_sequences, first_q, element)
        # Visit tiles of queries whose keys in the band exist.
        before = offset + own_diagonal
        begin = tl.maximum(-(before + BLOCK_KV - 1), 0) // BLOCK_Q
        end = tl.minimum(
            tl.cdiv(tl.maximum(size_kv - before, 0), BLOCK_Q), tl.cdiv(size_q, BLOCK_Q)
        )
        count = tl.where(is_visible, tl.maximum(end - begin, 0), 0)
        for step in tl.range(0, count):
            start_q = (begin + step) * BLOCK_Q
            rows = rows_at(
                mask, batch, element, head, first_q + start_q, first_q + size_q, first_q, first_kv,
                size_kv, own_diagonal - first_q, BLOCK_Q,
            )  # fmt: skip
            acc += score_gradients(
                q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, terms, mask, strides, rows, row,
                start_q + before, rule, window_left, window_right, GROUP_SIZE, HEAD_DIM, HEAD_DIM_V,
                BLOCK_KV,
            )  # fmt: skip

    # Store the band's tile if its distances have their own entries, otherwise its sum.
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
    """Compute the gradient of `relative_bias`, by name, or nothing."""
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
    """Return warps and stages: a step loads four tiles, and no accumulator is as wide as a head."""
    size = max(spec.head_dim, spec.head_dim_v)
    return {"num_warps": 8, "num_stages": 2 if spec.dtype_bits == 16 and size <= 128 else 1}


def sums_of_distances(tiles: Tensor, sums: Tensor, bands: Bands) -> Tensor:
    """Return the bands' sums over each clipped distance, [Hq, 2R + 1]."""
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
