"""Write the keys and values of new tokens into the pages of a cache."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_attn.kernels.library.arguments import cache_arguments
from pallas_attn.kernels.library.pages import load_rows_at, store_rows_at
from pallas_attn.kernels.library.quantized import quantize
from pallas_attn.kernels.library.rotary import load_rotation, rotate
from pallas_attn.kernels.library.sequences import locate_tokens
from pallas_attn.kernels.library.tiles import arange
from pallas_attn.launch import ALL, COLUMNS, block_spec, launch
from twin_attention.contract.operands import AppendOperands
from twin_attention.contract.paged_spec import AppendSpec
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
    cu_seqlens_ref,
    q_ref,
    cos_ref,
    sin_ref,
    k_ref,
    v_ref,
    q_out_ref=None,
    *,
    num_tokens,
    head_dim,
    head_dim_v,
    pairs,
    interleaved,
    block_d,
    block_dv,
    block_pairs,
    compiled,
    block_heads,
):
    """One program writes block_heads heads of one token of one sequence.

    Operands, of this program's sequence and token: k_new [Hkv, D], v_new [Hkv, Dv]; pools k [P,
    page_size, Hkv, D] and v [P, page_size, Hkv, Dv], inputs whose memory the outputs reuse; table
    [max_pages] and len [], int32; scales [] or [Hkv], float32, or None; cos and sin [positions,
    pairs] or None. Grid: (head tiles, tokens, batch).

    Packed tokens: all of k_new [Tq, Hkv, D], v_new [Tq, Hkv, Dv], tables [B, max_pages], lens [B]
    and cu_seqlens [B + 1], otherwise None. Grid: (tiles of one row of `locate_tokens`, head tiles);
    only the first axis can exceed 65535 programs.
    """
    # Locate the token and its slot.
    num_pages, page_size, heads_kv, _ = k_ref.shape
    max_pages, heads_q = table_ref.shape[-1], 0 if q_ref is None else q_ref.shape[-2]
    tile = pl.program_id(0 if cu_seqlens_ref is None else 1)
    head = tile * block_heads + arange(block_heads)
    if cu_seqlens_ref is None:
        position = len_ref[...] - num_tokens + pl.program_id(1)
        exists = (position >= 0) & (position < max_pages * page_size)
        own, place = (), (head,)
        q_reads = head < heads_q
        q_writes = q_reads
    else:
        num_sequences = len_ref.shape[0]
        sequence, first, tokens, token = locate_tokens(
            cu_seqlens_ref, pl.program_id(0), num_tokens, 1, 1
        )
        is_token = (sequence < num_sequences) & (token < tokens)
        sequence = jnp.minimum(sequence, num_sequences - 1)
        position = jnp.where(is_token, len_ref[sequence] - tokens + token, 0)
        exists = is_token & (position >= 0) & (position < max_pages * page_size)
        own, place = (sequence,), (jnp.minimum(first + token, num_tokens - 1), head)
        q_reads = is_token & (head < heads_q)
        q_writes = (token < tokens) & (head < heads_q)
    entry = jnp.maximum(position, 0) // page_size
    page = plt.load(table_ref.at[(*own, entry)], mask=exists, other=0)
    exists = exists & (page >= 0) & (page < num_pages)
    slot = jnp.maximum(position, 0) % page_size
    writes = (head < heads_kv) & exists

    # Copy the key and the value, rotated if asked for, and quantised if the cache is.
    cos = sin = None
    if cos_ref is not None:
        cos, sin = load_rotation(cos_ref, sin_ref, position, pairs, block_pairs)
    k_scale = None
    if k_scale_ref is not None:
        k_scale = load_scale(k_scale_ref, head, writes)
    copy_rows(
        k_new_ref, place, writes, k_ref, (page, slot, head), writes, k_scale, cos, sin, head_dim,
        block_d, pairs, block_pairs, interleaved, compiled,
    )  # fmt: skip
    if v_ref is not None:
        v_scale = None
        if v_scale_ref is not None:
            v_scale = load_scale(v_scale_ref, head, writes)
        copy_rows(
            v_new_ref, place, writes, v_ref, (page, slot, head), writes, v_scale, None, None,
            head_dim_v, block_dv, pairs, block_pairs, interleaved, compiled,
        )  # fmt: skip

    # Rotate the queries.
    if q_ref is not None:
        copy_rows(
            q_ref, place, q_reads, q_out_ref, place, q_writes, None, cos, sin, head_dim, block_d,
            pairs, block_pairs, interleaved, compiled,
        )  # fmt: skip


def copy_rows(
    source,
    source_index,
    reads,
    target,
    target_index,
    writes,
    scale,
    cos,
    sin,
    size,
    block_size,
    pairs,
    block_pairs,
    interleaved,
    compiled,
):
    def load(*columns):
        return load_rows_at(source, source_index, reads, *columns)

    def store(x, *columns):
        if scale is not None:
            x = quantize(x, scale[:, None], target.dtype, compiled)
        store_rows_at(target, x, target_index, writes, *columns)

    if cos is None:
        store(load(size, block_size), size, block_size)
        return
    second, step = (1, 2) if interleaved else (pairs, 1)
    x = load(pairs, block_pairs, 0, step)
    y = load(pairs, block_pairs, second, step)
    x, y = rotate(x, y, cos, sin)
    store(x, pairs, block_pairs, 0, step)
    store(y, pairs, block_pairs, second, step)
    if size > 2 * pairs:
        rest = size - 2 * pairs
        store(load(rest, block_size, 2 * pairs), rest, block_size, 2 * pairs)


def load_scale(ref, head, writes):
    if not ref.shape:
        return jnp.broadcast_to(ref[...], head.shape)
    return plt.load(ref.at[head], mask=writes, other=1.0)


def append_kv(
    operands: AppendOperands[Array], spec: AppendSpec, backend: Backend
) -> tuple[Array, ...]:
    """Return k_pages and v_pages, in the given memory if XLA allows it, and rotated queries."""
    cache, q, cos = spec.cache, operands.q, operands.rotary_cos
    pairs = spec.rotary_dim // 2

    rows, of_batch = (ALL, COLUMNS), ALL if spec.packed else "batch"
    of_tokens = (ALL, *rows) if spec.packed else ("batch", "token", *rows)
    of_pool = ALL, ALL, *rows

    def place(*program):
        return {} if spec.packed else dict(zip(("tile", "token", "batch"), program, strict=True))

    def of(x, *axes):
        return block_spec(x, place, *axes)

    outputs = operands.k_pages, operands.v_pages, *(() if q is None else (q,))
    outputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), outputs)
    out_specs = *(of(x, *of_pool) for x in outputs[:2]), *(of(x, *of_tokens) for x in outputs[2:])
    heads = max(cache.heads, spec.heads_q)

    def grid(config):
        tiles = pl.cdiv(heads, config.block_heads)
        if spec.packed:
            return spec.tokens + spec.batch + 1, tiles
        return tiles, spec.tokens, spec.batch

    return launch(
        "append_kv",
        append_kv_kernel,
        grid,
        operands,
        (
            of(operands.k_new, *of_tokens),
            of(operands.v_new, *of_tokens),
            of(operands.k_pages, *of_pool),
            of(operands.v_pages, *of_pool),
            of(operands.block_tables, of_batch, ALL),
            of(operands.seq_lens, of_batch),
            of(operands.k_scale, ALL),
            of(operands.v_scale, ALL),
            of(operands.cu_seqlens_q, ALL),
            of(q, *of_tokens),
            of(cos, *rows),
            of(operands.rotary_sin, *rows),
        ),
        outputs,
        out_specs,
        cache_arguments(cache, operands.k_pages)
        | {
            "num_tokens": spec.tokens,
            "pairs": pairs,
            "interleaved": spec.interleaved,
            "block_pairs": padded_head_dim(pairs),
            "compiled": not backend.interpreted,
        },
        spec,
        backend,
        aliases={1: 0} if cache.latent else {2: 0, 3: 1},
    )
