"""Write the keys and values of new tokens into the pages of a cache."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_attn.kernels.portable.arguments import cache_arguments
from pallas_attn.kernels.portable.pages import load_rows_at, store_rows_at
from pallas_attn.kernels.portable.quantized import quantize
from pallas_attn.kernels.portable.tiles import arange
from pallas_attn.launch import launch
from twin_attention.contract.operands import AppendOperands
from twin_attention.contract.spec import PagedCache
from twin_attention.targets.config import padded_head_dim
from twin_attention.targets.family import Backend


def append_kv_kernel(
    k_new_ref,
    v_new_ref,
    _k_ref,
    _v_ref,
    table_ref,
    len_ref,
    k_scale_ref,
    v_scale_ref,
    k_ref,
    v_ref,
    *,
    num_pages,
    max_pages,
    tokens,
    heads_kv,
    page_size,
    head_dim,
    head_dim_v,
    block_d,
    block_dv,
    compiled,
    block_heads,
):
    """One program writes one token of one sequence, block_heads heads of it.

    Operands, of this program's sequence and token: k_new [Hkv, D], v_new [Hkv, Dv]; the pools k
    [P, page_size, Hkv, D] and v [P, page_size, Hkv, Dv], inputs that the outputs stand in for;
    table [max_pages] and len [], int32; scales [] or [Hkv], float32, or None. Grid: (head tiles,
    tokens, batch). Token t goes to position ``len - tokens + t``; a position outside the table, or
    a page outside the pool, is not written.
    """
    # Locate the token's slot.
    position = len_ref[...] - tokens + pl.program_id(1)
    exists = (position >= 0) & (position < max_pages * page_size)
    page = plt.load(table_ref.at[jnp.maximum(position, 0) // page_size], mask=exists, other=0)
    exists = exists & (page >= 0) & (page < num_pages)
    slot = jnp.maximum(position, 0) % page_size
    head = pl.program_id(0) * block_heads + arange(block_heads)
    writes = (head < heads_kv) & exists

    # Copy the key and the value, quantised where the cache is.
    k_new = load_rows_at(k_new_ref, (head,), writes, head_dim, block_d)
    if k_scale_ref is not None:
        scale = load_scale(k_scale_ref, head, writes)
        k_new = quantize(k_new, scale[:, None], k_ref.dtype, compiled)
    store_rows_at(k_ref, k_new, (page, slot, head), writes, head_dim, block_d)
    v_new = load_rows_at(v_new_ref, (head,), writes, head_dim_v, block_dv)
    if v_scale_ref is not None:
        scale = load_scale(v_scale_ref, head, writes)
        v_new = quantize(v_new, scale[:, None], v_ref.dtype, compiled)
    store_rows_at(v_ref, v_new, (page, slot, head), writes, head_dim_v, block_dv)


def load_scale(ref, head, writes):
    """Load the scale of each head, from one of all heads or one of each."""
    if not ref.shape:
        return jnp.broadcast_to(ref[...], head.shape)
    return plt.load(ref.at[head], mask=writes, other=1.0)


def append_kv(
    operands: AppendOperands[Array], cache: PagedCache, backend: Backend
) -> tuple[Array, Array]:
    """Call `append_kv_kernel`.

    Returns:
        k_pages and v_pages with the new tokens, in the memory of those given where XLA allows it.
    """
    k_new, v_new, k_pages, v_pages, _, _, k_scale, v_scale = operands
    batch, tokens, heads, _ = k_new.shape

    def token_spec(x):
        block = (None, None, heads, padded_head_dim(x.shape[3]))
        return pl.BlockSpec(block, lambda tile, token, batch: (batch, token, 0, 0))

    def whole_spec(x):
        if x is None:
            return None
        shape = (*x.shape[:-1], padded_head_dim(x.shape[-1])) if x.ndim == 4 else x.shape
        return pl.BlockSpec(shape, lambda *_: (0,) * x.ndim)

    pools = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k_pages, v_pages))
    return launch(
        "append_kv",
        append_kv_kernel,
        lambda config: (pl.cdiv(heads, config.block_heads), tokens, batch),
        operands,
        (
            token_spec(k_new),
            token_spec(v_new),
            whole_spec(k_pages),
            whole_spec(v_pages),
            pl.BlockSpec((None, cache.max_pages), lambda tile, token, batch: (batch, 0)),
            pl.BlockSpec((None,), lambda tile, token, batch: (batch,)),
            whole_spec(k_scale),
            whole_spec(v_scale),
        ),
        pools,
        tuple(map(whole_spec, pools)),
        cache_arguments(cache, k_pages, v_pages)
        | {"tokens": tokens, "heads_kv": heads, "compiled": not backend.interpreted},
        cache,
        backend,
        aliases={2: 0, 3: 1},
    )
