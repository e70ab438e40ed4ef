"""Write the keys and values of new tokens into the pages of a cache."""

import triton
import triton.language as tl
from torch import Tensor

from torch_attn.kernels.portable.quantized import quantize
from torch_attn.launch import as_bits, cache_arguments, launch
from twin_attention.contract.spec import PagedCache


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
    k_new_batch,
    k_new_token,
    k_new_head,
    v_new_batch,
    v_new_token,
    v_new_head,
    k_scale_head,
    v_scale_head,
    tables_batch,
    num_pages,
    max_pages,
    K_PAGE: tl.constexpr,
    K_SLOT: tl.constexpr,
    K_HEAD: tl.constexpr,
    V_PAGE: tl.constexpr,
    V_SLOT: tl.constexpr,
    V_HEAD: tl.constexpr,
    HEADS_KV: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    QUANTIZED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """One program writes one token of one sequence, BLOCK_Q heads of it.

    Operands: k_new [B, T, Hkv, D] and v_new [B, T, Hkv, Dv], pools, tables, lens and scales as in
    `paged_decode_kernel`. Grid: (head tiles, tokens, batch) in one axis. Token t goes to position
    ``len - TOKENS + t``; a position outside the table, or a page outside the pool, is not written.
    """
    # Locate the token's slot.
    num_tiles: tl.constexpr = (HEADS_KV + BLOCK_Q - 1) // BLOCK_Q
    tile = tl.program_id(0) % num_tiles
    token = tl.program_id(0) // num_tiles % TOKENS
    batch = (tl.program_id(0) // num_tiles // TOKENS).to(tl.int64)
    position = tl.load(lens_ptr + batch) - TOKENS + token
    exists = (position >= 0) & (position < max_pages * PAGE_SIZE)
    page = tl.load(
        tables_ptr + batch * tables_batch + position // PAGE_SIZE, mask=exists, other=0
    ).to(tl.int64)
    exists = exists & (page >= 0) & (page < num_pages)
    slot = (position % PAGE_SIZE).to(tl.int64)
    head = tile * BLOCK_Q + tl.arange(0, BLOCK_Q).to(tl.int64)
    writes = exists & (head < HEADS_KV)

    # Copy the key and the value, quantised where the cache is.
    k_new = k_new_ptr + batch * k_new_batch + token * k_new_token + head * k_new_head
    v_new = v_new_ptr + batch * v_new_batch + token * v_new_token + head * v_new_head
    k_slot = k_ptr + page * K_PAGE + slot * K_SLOT + head * K_HEAD
    v_slot = v_ptr + page * V_PAGE + slot * V_SLOT + head * V_HEAD
    store_key(k_new, k_slot, k_scale_ptr, head * k_scale_head, writes, HEAD_DIM, BLOCK_D, QUANTIZED)
    store_key(
        v_new, v_slot, v_scale_ptr, head * v_scale_head, writes, HEAD_DIM_V, BLOCK_DV, QUANTIZED
    )


@triton.jit
def store_key(
    source,
    destination,
    scale_ptr,
    scale_offset,
    writes,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """Copy rows at the pointers `source` to the pointers `destination` of a cache."""
    cols = tl.arange(0, BLOCK_SIZE)[None, :]
    mask = writes[:, None] & (cols < SIZE)
    x = tl.load(source[:, None] + cols, mask=mask, other=0.0)
    dtype: tl.constexpr = destination.dtype.element_ty
    if QUANTIZED:
        scale = tl.load(scale_ptr + scale_offset, mask=writes, other=1.0)
        x = quantize(tl.div_rn(x.to(tl.float32), scale[:, None]), dtype)
    tl.store(destination[:, None] + cols, x.to(dtype), mask=mask)


def append_kv(
    k_new: Tensor,
    v_new: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    cache: PagedCache,
) -> None:
    """Launch `append_kv_kernel`, which writes into k_pages and v_pages."""
    batch, tokens, heads, _ = k_new.shape

    def arguments():
        strides = {
            f"{name}_{axis}": stride
            for name, x in (("k_new", k_new), ("v_new", v_new))
            for axis, stride in zip(("batch", "token", "head"), x.stride(), strict=False)
        }
        problem = cache_arguments(cache, k_pages, v_pages, block_tables, k_scale, v_scale)
        return problem | strides | {"TOKENS": tokens}

    launch(
        "append_kv",
        append_kv_kernel,
        lambda config: (triton.cdiv(heads, config.block_q) * tokens * batch,),
        (
            k_new,
            v_new,
            as_bits(k_pages),
            as_bits(v_pages),
            block_tables,
            seq_lens,
            k_scale,
            v_scale,
        ),
        arguments,
        cache,
        batch,
        tokens,
    )
