"""Write the keys and values of new tokens into the pages of a cache."""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from pallas_attn.kernels.explicit.mma_launch import launch
from pallas_attn.kernels.explicit.registers import THREADS, divide, thread_index
from pallas_attn.kernels.library.quantized import round_to
from pallas_attn.kernels.paged.memory import UNIT, load_unit, store_unit
from twin_attention.contract.operands import AppendOperands
from twin_attention.contract.paged_spec import AppendSpec
from twin_attention.targets.family import Backend


def append_kv_kernel(
    k_new_ref, v_new_ref, table_ref, len_ref, k_scale_ref, v_scale_ref, k_ref, v_ref, *, block_heads
):
    """One program writes block_heads heads of one token of one sequence.

    k_new [B, T, Hkv, D], v_new [B, T, Hkv, Dv], table [B, max_pages], len [B], scales [1] or [Hkv].
    The grid is one axis.
    """
    # Locate the token's slot.
    _, tokens, heads, _ = k_new_ref.shape
    num_pages, page_size = k_ref.shape[:2]
    capacity = table_ref.shape[1] * page_size
    program = lax.axis_index("program")
    tiles = pl.cdiv(heads, block_heads)
    tile, rest = program % tiles, program // tiles
    token, batch = rest % tokens, rest // tokens
    position = len_ref[batch] - tokens + token
    exists = (position >= 0) & (position < capacity)
    position = jnp.clip(position, 0, capacity - 1)
    page, slot = table_ref[batch, lax.div(position, page_size)], lax.rem(position, page_size)
    exists = exists & (page >= 0) & (page < num_pages)
    thread = thread_index()
    first_head = tile * block_heads

    # Load the key and the value, and quantise them if the cache is quantised.
    def load(new, pool, scale):
        size = pool.shape[3]
        units = []
        for start in range(0, min(block_heads, heads) * size, UNIT * THREADS):
            element = start + thread * UNIT
            head, column = first_head + lax.div(element, size), lax.rem(element, size)
            writes = exists & (element < block_heads * size) & (head < heads)
            head = jnp.minimum(head, heads - 1)
            numbers = load_unit(new, (batch, token, head, column))
            if scale is not None:
                factor = scale[head if scale.shape[0] > 1 else 0]
                quotients = [divide(x.astype(jnp.float32), factor) for x in numbers]
                numbers = [round_to(x, pool.dtype) for x in quotients]
            units.append((writes, (page, slot, head, column), numbers))
        return units

    units_k, units_v = load(k_new_ref, k_ref, k_scale_ref), load(v_new_ref, v_ref, v_scale_ref)

    # Store them.
    for pool, units in ((k_ref, units_k), (v_ref, units_v)):
        for writes, place, numbers in units:

            @pl.when(writes)
            def _(pool=pool, place=place, numbers=numbers):
                store_unit(numbers, pool, place)


def append_kv(
    operands: AppendOperands[Array], spec: AppendSpec, backend: Backend
) -> tuple[Array, Array]:
    k_new, v_new = operands.k_new, operands.v_new
    batch, tokens, heads, _ = k_new.shape
    scales = [None if x is None else x.reshape(-1) for x in (operands.k_scale, operands.v_scale)]
    pools = operands.k_pages, operands.v_pages
    return launch(
        "append_kv",
        append_kv_kernel,
        lambda config: pl.cdiv(heads, config.block_heads) * tokens * batch,
        (k_new, v_new, operands.block_tables, operands.seq_lens, *scales),
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools),
        lambda config: (),
        spec,
        backend,
        problem={},
        aliased=pools,
    )
