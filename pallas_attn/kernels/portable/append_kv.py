"""Write the keys and values of new tokens into the pages of a cache."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_attn.dispatch import INTERPRET
from pallas_attn.kernels.portable.pages import load_rows_at, store_rows_at
from pallas_attn.kernels.portable.quantized import divide, quantize
from pallas_attn.kernels.portable.tiles import arange
from pallas_attn.launch import cache_arguments, launch
from twin_attention.contract.spec import PagedCache
from twin_attention.targets.config import padded_head_dim


def append_kv_kernel(
    *refs,
    num_pages,
    max_pages,
    tokens,
    heads_kv,
    page_size,
    head_dim,
    head_dim_v,
    block_d,
    block_dv,
    quantized,
    compiled,
    block_q,
):
    """One program writes one token of one sequence, block_q heads of it.

    Operands, of this program's sequence and token: k_new [Hkv, D], v_new [Hkv, Dv], table
    [max_pages] and len [], int32; scales [] or [Hkv] if quantized, float32; the pools k
    [P, page_size, Hkv, D] and v [P, page_size, Hkv, Dv], read and written. Grid: (head tiles,
    tokens, batch). Token t goes to position ``len - tokens + t``; a position outside the table, or
    a page outside the pool, is not written.
    """
    # Locate the token's slot.
    k_new_ref, v_new_ref, table_ref, len_ref, *scale_refs, _, _, k_ref, v_ref = refs
    position = len_ref[...] - tokens + pl.program_id(1)
    exists = (position >= 0) & (position < max_pages * page_size)
    page = plt.load(table_ref.at[jnp.maximum(position, 0) // page_size], mask=exists, other=0)
    exists = exists & (page >= 0) & (page < num_pages)
    slot = jnp.maximum(position, 0) % page_size
    head = pl.program_id(0) * block_q + arange(block_q)
    writes = (head < heads_kv) & exists

    # Copy the key and the value, quantised where the cache is.
    k_new = load_rows_at(k_new_ref, (head,), writes, head_dim, block_d)
    v_new = load_rows_at(v_new_ref, (head,), writes, head_dim_v, block_dv)
    k_scale, v_scale = (
        (load_scale(x, head, writes) for x in scale_refs) if quantized else (None,) * 2
    )
    where = (page, slot, head)
    store_key(k_ref, k_new, where, writes, k_scale, head_dim, block_d, compiled)
    store_key(v_ref, v_new, where, writes, v_scale, head_dim_v, block_dv, compiled)


def load_scale(ref, head, writes):
    """The scale of each head."""
    if not ref.shape:
        return jnp.broadcast_to(ref[...], head.shape)
    return plt.load(ref.at[head], mask=writes, other=1.0)


def store_key(ref, x, index, writes, scale, size, block_size, compiled):
    """Store rows in a cache, quantised by `scale`, one number a row; None where it is not."""
    if scale is not None:
        x = divide(x.astype(jnp.float32), jnp.broadcast_to(scale[:, None], x.shape), compiled)
        x = quantize(x, ref.dtype)
    store_rows_at(ref, x, index, writes, size, block_size)


def append_kv(
    k_new: Array,
    v_new: Array,
    k_pages: Array,
    v_pages: Array,
    block_tables: Array,
    seq_lens: Array,
    k_scale: Array | None,
    v_scale: Array | None,
    cache: PagedCache,
    *,
    backend: str,
) -> tuple[Array, Array]:
    """Call `append_kv_kernel`.

    Args:
        backend: "interpret", or the target to compile for, "sm80" or "sm90".

    Returns:
        k_pages and v_pages with the new tokens, in the memory of those given where XLA allows it.
    """
    batch, tokens, heads, _ = k_new.shape

    def of_token(x):
        block = (None, None, heads, padded_head_dim(x.shape[3]))
        return pl.BlockSpec(block, lambda tile, token, batch: (batch, token, 0, 0))

    def whole(x):
        shape = (*x.shape[:-1], padded_head_dim(x.shape[-1])) if x.ndim == 4 else x.shape
        return pl.BlockSpec(shape, lambda *_: (0,) * x.ndim)

    scales = (k_scale, v_scale) if cache.is_quantized else ()
    operands = (k_new, v_new, block_tables, seq_lens, *scales, k_pages, v_pages)
    pools = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_pages, v_pages))
    return launch(
        "append_kv",
        append_kv_kernel,
        lambda config: (pl.cdiv(heads, config.block_q), tokens, batch),
        operands,
        (
            of_token(k_new),
            of_token(v_new),
            pl.BlockSpec((None, cache.max_pages), lambda tile, token, batch: (batch, 0)),
            pl.BlockSpec((None,), lambda tile, token, batch: (batch,)),
            *map(whole, scales),
            whole(k_pages),
            whole(v_pages),
        ),
        pools,
        tuple(map(whole, pools)),
        cache_arguments(cache, k_pages, v_pages)
        | {"tokens": tokens, "heads_kv": heads, "compiled": backend != INTERPRET},
        cache,
        backend,
        aliases={len(operands) - 2: 0, len(operands) - 1: 1},
    )
