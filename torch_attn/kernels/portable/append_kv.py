"""Write the keys and values of new tokens into the pages of a cache."""

import triton
import triton.language as tl
from torch import Tensor

from torch_attn.kernels.portable.arguments import cache_arguments
from torch_attn.kernels.portable.pages import load_rows_at, store_rows_at
from torch_attn.kernels.portable.quantized import as_bits, quantize
from torch_attn.launch import KernelCall, Prepared, launch
from twin_attention.contract.operands import AppendOperands
from twin_attention.contract.spec import PagedCache
from twin_attention.targets.family import Backend


@triton.jit(do_not_specialize=["num_pages", "max_pages"])
def append_kv_kernel(
    k_new_ptr,
    v_new_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    lens_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_new_strides,
    v_new_strides,
    k_scale_stride,
    v_scale_stride,
    table_stride,
    num_pages,
    max_pages,
    K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr,
    HEADS_KV: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """One program writes one token of one sequence, BLOCK_HEADS heads of it.

    Operands: k_new [B, T, Hkv, D] and v_new [B, T, Hkv, Dv], pools, tables, lens and scales as in
    `paged_decode_kernel`. Grid: (head tiles, tokens, batch) in one axis. Token t goes to position
    ``len - TOKENS + t``; a position outside the table, or a page outside the pool, is not written.
    """
    # Locate the token's slot.
    num_tiles: tl.constexpr = (HEADS_KV + BLOCK_HEADS - 1) // BLOCK_HEADS
    tile = tl.program_id(0) % num_tiles
    token = tl.program_id(0) // num_tiles % TOKENS
    batch = (tl.program_id(0) // num_tiles // TOKENS).to(tl.int64)
    position = tl.load(lens_ptr + batch) - TOKENS + token
    exists = (position >= 0) & (position < max_pages * PAGE_SIZE)
    entry = tables_ptr + batch * table_stride + position // PAGE_SIZE
    page = tl.load(entry, mask=exists, other=0).to(tl.int64)
    exists = exists & (page >= 0) & (page < num_pages)
    slot = (position % PAGE_SIZE).to(tl.int64)
    head = tile * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS).to(tl.int64)
    writes = exists & (head < HEADS_KV)

    # Copy the key and the value, quantised where the cache is.
    k_new = load_rows_at(k_new_ptr, (batch, token, head), k_new_strides, writes, HEAD_DIM, BLOCK_D)
    if k_scale_ptr is not None:
        scale = tl.load(k_scale_ptr + head * k_scale_stride, mask=writes, other=1.0)
        k_new = quantize(k_new, scale[:, None], k_ptr.dtype.element_ty)
    store_rows_at(k_ptr, k_new, (page, slot, head), K_STRIDES, writes, HEAD_DIM, BLOCK_D)
    v_new = load_rows_at(
        v_new_ptr, (batch, token, head), v_new_strides, writes, HEAD_DIM_V, BLOCK_DV
    )
    if v_scale_ptr is not None:
        scale = tl.load(v_scale_ptr + head * v_scale_stride, mask=writes, other=1.0)
        v_new = quantize(v_new, scale[:, None], v_ptr.dtype.element_ty)
    store_rows_at(v_ptr, v_new, (page, slot, head), V_STRIDES, writes, HEAD_DIM_V, BLOCK_DV)


def append_kv(operands: AppendOperands[Tensor], cache: PagedCache, backend: Backend) -> None:
    """Launch `append_kv_kernel`, which writes into k_pages and v_pages."""
    bits = operands._replace(k_pages=as_bits(operands.k_pages), v_pages=as_bits(operands.v_pages))
    launch("append_kv", append_kv_kernel, _prepare, bits, cache, backend)


def _prepare(call: KernelCall) -> Prepared:
    """Return grid and arguments of `append_kv_kernel`."""
    operands = AppendOperands._make(call.layouts)
    k_new, v_new = operands.k_new, operands.v_new
    batch, tokens, heads, _ = k_new.shape
    grid = (triton.cdiv(heads, call.config.block_heads) * tokens * batch,)
    return grid, cache_arguments(call.spec, operands) | {
        "k_new_strides": k_new.strides[:3],
        "v_new_strides": v_new.strides[:3],
        "TOKENS": tokens,
    }
