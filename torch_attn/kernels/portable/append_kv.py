"""Write new tokens' keys and values into a cache's pages."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from torch_attn.kernels.library.arguments import cache_arguments, cache_of
from torch_attn.kernels.library.pages import load_rows_at, store_rows_at
from torch_attn.kernels.library.quantized import as_bits, quantize
from torch_attn.kernels.library.rotary import Rotation, load_rotation, rotate, rotation_argument
from torch_attn.kernels.library.sequences import locate_tokens
from torch_attn.launch import KernelCall, Prepared, launch
from torch_attn.layouts import Layout
from twin_attention.contract.operands import AppendOperands
from twin_attention.contract.paged_spec import AppendSpec
from twin_attention.targets.config import padded_head_dim
from twin_attention.targets.family import Backend


@triton.jit(
    do_not_specialize=["num_tokens", "num_sequences", "num_positions", "num_pages", "max_pages"]
)
def append_kv_kernel(
    k_new_ptr, v_new_ptr, cache, cu_seqlens_ptr, q_ptr, rotation, q_out_ptr, k_new_strides,
    v_new_strides, q_strides, num_tokens, num_sequences, num_positions, num_pages, max_pages,
    HEADS_Q: tl.constexpr, HEADS_KV: tl.constexpr, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_PAIRS: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    """One program writes BLOCK_HEADS heads of one token of one sequence.

    Operands: k_new [B, T, Hkv, D], v_new [B, T, Hkv, Dv], or None without cache.v, and a `Cache`.
    Grid: (head tiles, tokens, batch) in one axis. Token t goes to position ``len - TOKENS + t``;
    one outside the table, or a page outside the pool, is not written. Packed tokens: [Tq, Hkv, D],
    [Tq, Hkv, Dv] and cu_seqlens [B + 1]; grid: (head tiles, tiles of one row of `locate_tokens`).
    Padding is not written.

    rotation: a `Rotation` of num_positions, or None. It rotates keys in float32, and queries q of
    the same tokens, or None; q_out is contiguous and 0 in the padding. Tiles cover q's heads, else
    those of keys.
    """
    # Locate the token and its slot.
    heads: tl.constexpr = HEADS_Q if HEADS_Q > HEADS_KV else HEADS_KV
    num_tiles: tl.constexpr = (heads + BLOCK_HEADS - 1) // BLOCK_HEADS
    tile = tl.program_id(0) % num_tiles
    head = tile * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS).to(tl.int64)
    if cu_seqlens_ptr is None:
        token = tl.program_id(0) // num_tiles % TOKENS
        batch = (tl.program_id(0) // num_tiles // TOKENS).to(tl.int64)
        position = tl.load(cache.lens + batch) - TOKENS + token
        exists = (position >= 0) & (position < max_pages * cache.page_size)
        place = (batch, token.to(tl.int64), head)
        row = batch * TOKENS + token
        q_reads = head < HEADS_Q
        q_writes = q_reads
    else:
        sequence, first, tokens, token = locate_tokens(
            cu_seqlens_ptr, tl.program_id(0) // num_tiles, num_tokens, num_sequences, 1, 1
        )
        batch = sequence.to(tl.int64)
        is_token = (sequence < num_sequences) & (token < tokens)
        position = tl.load(cache.lens + batch, mask=is_token, other=0) - tokens + token
        position = tl.where(is_token, position, 0)
        exists = is_token & (position >= 0) & (position < max_pages * cache.page_size)
        row = (first + token).to(tl.int64)
        place = (row, head)
        q_reads = is_token & (head < HEADS_Q)
        q_writes = (token < tokens) & (head < HEADS_Q)
    entry = cache.tables + batch * cache.table_stride + position // cache.page_size
    page = tl.load(entry, mask=exists, other=0).to(tl.int64)
    exists = exists & (page >= 0) & (page < num_pages)
    slot = (position % cache.page_size).to(tl.int64)
    writes = exists & (head < HEADS_KV)

    # Copy the key and the value, rotated if asked for, and quantised if the cache is.
    cos = None
    sin = None
    if rotation is not None:
        cos, sin = load_rotation(rotation, position, num_positions, PAIRS, BLOCK_PAIRS)
    k_scale = None
    if cache.k_scale is not None:
        k_scale = tl.load(cache.k_scale + head * cache.k_scale_stride, mask=writes, other=1.0)
    copy_rows(
        k_new_ptr, place, k_new_strides, writes, cache.k, (page, slot, head), cache.k_strides,
        writes, k_scale, cos, sin, HEAD_DIM, BLOCK_D, PAIRS, BLOCK_PAIRS, INTERLEAVED,
    )  # fmt: skip
    if cache.v is not None:
        v_scale = None
        if cache.v_scale is not None:
            v_scale = tl.load(cache.v_scale + head * cache.v_scale_stride, mask=writes, other=1.0)
        copy_rows(
            v_new_ptr, place, v_new_strides, writes, cache.v, (page, slot, head), cache.v_strides,
            writes, v_scale, None, None, HEAD_DIM_V, BLOCK_DV, PAIRS, BLOCK_PAIRS, INTERLEAVED,
        )  # fmt: skip

    # Rotate the queries.
    if q_ptr is not None:
        copy_rows(
            q_ptr, place, q_strides, q_reads, q_out_ptr, (row * HEADS_Q + head,), (HEAD_DIM,),
            q_writes, None, cos, sin, HEAD_DIM, BLOCK_D, PAIRS, BLOCK_PAIRS, INTERLEAVED,
        )  # fmt: skip


@triton.jit
def copy_rows(
    source, source_index, source_strides, reads, target, target_index, target_strides, writes,
    scale, cos, sin, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Copy rows, PAIRS pairs rotated, quantised if there is a scale; 0 for those not in `reads`."""
    if cos is None:
        x = load_rows_at(source, source_index, source_strides, reads, SIZE, BLOCK_SIZE)
        store_new(target, x, scale, target_index, target_strides, writes, SIZE, BLOCK_SIZE, 0, 1)
    else:
        second: tl.constexpr = 1 if INTERLEAVED else PAIRS
        step: tl.constexpr = 2 if INTERLEAVED else 1
        x = load_rows_at(source, source_index, source_strides, reads, PAIRS, BLOCK_PAIRS, 0, step)
        y = load_rows_at(
            source, source_index, source_strides, reads, PAIRS, BLOCK_PAIRS, second, step
        )
        x, y = rotate(x, y, cos, sin)
        store_new(
            target, x, scale, target_index, target_strides, writes, PAIRS, BLOCK_PAIRS, 0, step
        )
        store_new(
            target, y, scale, target_index, target_strides, writes, PAIRS, BLOCK_PAIRS, second, step
        )
        if SIZE > 2 * PAIRS:
            rest: tl.constexpr = SIZE - 2 * PAIRS
            x = load_rows_at(
                source, source_index, source_strides, reads, rest, BLOCK_SIZE, 2 * PAIRS
            )
            store_new(
                target, x, scale, target_index, target_strides, writes, rest, BLOCK_SIZE,
                2 * PAIRS, 1,
            )  # fmt: skip


@triton.jit
def store_new(
    base, x, scale, index, strides, is_row, SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    FIRST: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Store rows as `store_rows_at` does, quantised if there is a scale for each row."""
    if scale is not None:
        x = quantize(x, scale[:, None], base.dtype.element_ty)
    store_rows_at(base, x, index, strides, is_row, SIZE, BLOCK_SIZE, FIRST, STEP)


def append_kv(
    operands: AppendOperands[Tensor], spec: AppendSpec, backend: Backend
) -> Tensor | None:
    pools = (None if x is None else as_bits(x) for x in (operands.k_pages, operands.v_pages))
    bits = operands._replace(**dict(zip(("k_pages", "v_pages"), pools, strict=True)))
    q = operands.q
    q_out = None if q is None else q.new_empty(q.shape)
    rotation = None if bits.rotary_cos is None else Rotation(bits.rotary_cos, bits.rotary_sin)
    tensors = (bits.k_new, bits.v_new, cache_of(bits), bits.cu_seqlens_q, q, rotation, q_out)
    launch("append_kv", append_kv_kernel, _prepare, tensors, spec, backend)
    return q_out


def _prepare(call: KernelCall) -> Prepared:
    spec = call.spec
    k_new, v_new, cache, _cu_seqlens, q, rotation, _q_out = call.layouts
    pairs = spec.rotary_dim // 2
    tiles = triton.cdiv(max(spec.cache.heads, spec.heads_q), call.config.block_heads)
    rows = spec.tokens + spec.batch + 1 if spec.packed else spec.tokens * spec.batch
    return (tiles * rows,), cache_arguments(spec.cache, cache) | {
        "k_new_strides": _row_strides(k_new),
        "v_new_strides": _row_strides(v_new),
        "q_strides": _row_strides(q),
        "rotation": rotation_argument(rotation),
        "num_tokens": spec.tokens if spec.packed else None,
        "num_sequences": spec.batch if spec.packed else None,
        "num_positions": None if rotation is None else rotation.cos.shape[0],
        "HEADS_Q": spec.heads_q,
        "TOKENS": None if spec.packed else spec.tokens,
        "PAIRS": pairs,
        "BLOCK_PAIRS": padded_head_dim(pairs),
        "INTERLEAVED": spec.interleaved,
    }


def _row_strides(x: Layout | None) -> Sequence[int] | None:
    return None if x is None else x.strides[:-1]
