"""Flash attention, backward of a bias that pairs share: sums of ds, recomputed tile by tile.

With all queries and keys, a program adds up one tile over batch elements and heads, otherwise a row
or a column of tiles of one head, in order: the same bits every time, and no further memory that
grows with the square of a length.
"""

import triton
import triton.language as tl
from torch import Tensor

from torch_attn.kernels.flash_bwd_terms import compiler_numbers, score_gradients
from torch_attn.kernels.library.mask import Mask, mask_argument
from torch_attn.kernels.library.pairs.rows import rows_at
from torch_attn.kernels.library.sequences import padded_row
from torch_attn.kernels.library.terms import (
    Bias,
    Terms,
    shares_values,
    store_bias_tile,
    terms_argument,
    with_strides,
)
from torch_attn.kernels.library.tiles import strides_of, visible_tiles
from torch_attn.launch import UNSPECIALIZED, KernelCall, Prepared, flash_arguments, launch
from twin_attention.contract.operands import AttentionOperands
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import Backend, portable_backend
from twin_attention.targets.kernels import FlashConfig


@triton.jit(do_not_specialize=UNSPECIALIZED)
def flash_bwd_bias_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, sums, terms, mask, strides, shared_heads,
    shared, seq_q, seq_kv, diagonal, heads_q, rule, window_left, window_right,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """One program adds up ds over the tiles that share a tile of the sums.

    Operands: as in `flash_bwd_dq_kernel`, and sums, a `Bias`. With all queries and keys, it is the
    gradient itself; programs are (tiles, heads, batch elements) of it, in one axis, tiles fastest,
    and each adds up `shared` heads and batch elements, shared_heads of each. Otherwise it is [B,
    Hq, Sq, 1] or [B, Hq, 1, Skv] float32; programs are (tiles of its axis, heads, batch elements).
    Loop invariant: acc is Σ ds over the tiles so far. Accumulation: float32.
    """
    tiles_q, tiles_kv = tl.cdiv(seq_q, BLOCK_Q), tl.cdiv(seq_kv, BLOCK_KV)
    if sums.of_rows and sums.of_keys:
        tiles = tiles_q * tiles_kv
    else:
        tiles = tiles_q if sums.of_rows else tiles_kv
    program, heads = tl.program_id(0), heads_q // shared_heads
    tile, head, element = program % tiles, program // tiles % heads, program // tiles // heads
    start_q, start_kv, first = tile * BLOCK_Q, tile * BLOCK_KV, 0
    if sums.of_rows and sums.of_keys:
        start_q, start_kv = tile // tiles_kv * BLOCK_Q, tile % tiles_kv * BLOCK_KV
    # Find the tiles that a row or a column of tiles sees.
    left, right = window_left, window_right
    if mask.q_ranges is not None:
        left, right = None, None
    if sums.of_rows:
        first, before, full, after = visible_tiles(
            start_q, seq_q, seq_kv, diagonal, left, right, BLOCK_Q, BLOCK_KV
        )
    else:
        first, before, full, after = visible_tiles(
            start_kv, seq_kv, seq_q, -diagonal, right, left, BLOCK_KV, BLOCK_Q
        )
    count = before + full + after
    if sums.of_rows and sums.of_keys:
        is_visible = (start_kv >= first) & (start_kv < first + count * BLOCK_KV)
        count = tl.where(is_visible, shared, 0)
    acc = tl.zeros([BLOCK_Q, BLOCK_KV], tl.float32)
    for step in tl.range(0, count):
        own_head, own_element, own_q, own_kv = head, element, start_q, start_kv
        if sums.of_rows and sums.of_keys:
            own_head, own_element = head + step % shared_heads, element + step // shared_heads
        elif sums.of_rows:
            own_kv = first + step * BLOCK_KV
        else:
            own_q = first + step * BLOCK_Q
        batch = tl.cast(own_element, tl.int64)
        row = padded_row(batch * heads_q + own_head, seq_q, None, 0, 0)
        rows = rows_at(
            mask, batch, own_element, own_head, own_q, seq_q, 0, 0, seq_kv, diagonal, BLOCK_Q
        )
        acc += score_gradients(
            q_ptr, k_ptr, v_ptr, dout_ptr, lse2_ptr, delta_ptr, terms, mask, strides, rows, row,
            own_kv, rule, window_left, window_right, GROUP_SIZE, HEAD_DIM, HEAD_DIM_V, BLOCK_KV,
        )  # fmt: skip

    # Store.
    if sums.of_rows and sums.of_keys:
        store_bias_tile(
            sums, acc, element, head, start_q, start_kv, seq_q, seq_kv, BLOCK_Q, BLOCK_KV
        )
    else:
        line = sums.entries + (tl.cast(element, tl.int64) * sums.batch + head * sums.head)
        if sums.of_rows:
            query = start_q + tl.arange(0, BLOCK_Q)
            tl.store(line + query, tl.sum(acc, 1), mask=query < seq_q)
        else:
            key = start_kv + tl.arange(0, BLOCK_KV)
            tl.store(line + key, tl.sum(acc, 0), mask=key < seq_kv)


def bias_gradient(
    operands: AttentionOperands[Tensor],
    inputs: tuple[Tensor, ...],
    terms: Terms,
    mask: Mask,
    spec: AttentionSpec,
    backend: Backend,
) -> dict[str, Tensor]:
    """Compute the gradient of a bias that pairs share, by name, or nothing."""
    bias = getattr(operands, "bias", None)
    if bias is None or not shares_values(bias.shape, spec):
        return {}
    _batch, _heads, rows, keys = bias.shape
    if rows > 1 and keys > 1:
        kind, values = "pairs", bias.new_empty(bias.shape)
    else:
        kind = "keys" if keys > 1 else "rows"
        size = (1, spec.seq_kv) if keys > 1 else (spec.seq_q, 1)
        values = inputs[-1].new_empty((spec.batch, spec.heads_q, *size))
    tensors = (*inputs, Bias(values), terms, mask)
    portable = portable_backend("torch_attn", backend.target)
    launch(
        "flash_bwd_dq", flash_bwd_bias_kernel, _prepare, tensors, spec, portable, kind,
        **compiler_numbers(spec),
    )  # fmt: skip
    if kind == "pairs":
        return {"bias": values}
    shared = [i for i in range(4) if bias.shape[i] == 1 and values.shape[i] > 1]
    values = values.sum(shared, keepdim=True) if shared else values
    return {"bias": values.to(bias.dtype)}


def _prepare(call: KernelCall) -> Prepared:
    spec, (kind,), config = call.spec, call.constants, call.config
    q, k, v, dout, _, _, sums, *_ = call.layouts
    assert isinstance(config, FlashConfig)
    arguments = flash_arguments(spec) | terms_argument(call) | mask_argument(call, of_keys=True)
    arguments["strides"] = strides_of(q=q, k=k, v=v, dout=dout)
    flags = tl.constexpr(kind != "keys"), tl.constexpr(kind != "rows")
    arguments["sums"] = with_strides(sums)._replace(of_rows=flags[0], of_keys=flags[1])
    batch, heads, *_ = sums.entries.shape
    arguments["shared_heads"] = spec.heads_q // heads
    arguments["shared"] = spec.heads_q // heads * (spec.batch // batch)
    tiles_q = triton.cdiv(spec.seq_q, config.block_q)
    tiles_kv = triton.cdiv(spec.seq_kv, config.block_kv)
    tiles = {"pairs": tiles_q * tiles_kv, "rows": tiles_q, "keys": tiles_kv}[kind]
    return (tiles * heads * batch,), arguments
