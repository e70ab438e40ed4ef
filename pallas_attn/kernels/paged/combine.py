"""Merge attention over disjoint sets of keys, by the formula of the portable kernel.

Each warp merges some of the parts, each lane in every 32nd column. Then the warps merge.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_attn.kernels.explicit.barriers import warpgroup_barrier
from pallas_attn.kernels.explicit.mma_launch import launch
from pallas_attn.kernels.explicit.registers import WARPS, thread_index
from pallas_attn.kernels.library.pages import splits_with_keys
from pallas_attn.kernels.library.softmax import LOG2E, add_sink, row_statistics
from pallas_attn.kernels.paged.memory import store_number
from twin_attention.contract.operands import DecodeOperands
from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.contract.spec import MergeSpec
from twin_attention.targets.family import Backend


def combine_kernel(
    outs_ref,
    lses_ref,
    sinks_ref,
    len_ref,
    out_ref,
    lse_ref,
    parts,
    numbers,
    *,
    tokens,
    capacity,
    window_left,
    block_keys,
    block_states,
):
    """One program merges one row.

    Operands: outs [N · B, T, H, Dv], lses [N · B, H, T] (float32, natural log); sinks [H] float32
    or None; len [B]; out [B, T, H, Dv] and lse [B, H, T]. Shared memory holds a row and two numbers
    for each warp, which merges block_states parts at a time.
    """
    # Locate the row.
    batches, num_tokens, heads, size = out_ref.shape
    program = lax.axis_index("program")
    head, rest = program % heads, program // heads
    token, batch = rest % num_tokens, rest // num_tokens
    num_states = outs_ref.shape[0] // batches
    thread = thread_index()
    warp, lane = lax.div(thread, 32), lax.rem(thread, 32)
    columns = [jnp.minimum(lane + start, size - 1) for start in range(0, size, 32)]
    if block_keys is not None:
        end = jnp.clip(len_ref[batch], 0, capacity)
        begin = 0 if window_left is None else jnp.maximum(end - tokens - window_left, 0)
        num_states = splits_with_keys(begin, end, num_states, block_keys)

    def merge(m_i, l_i, acc, lses, rows):
        m_new = m_i
        for s in lses:
            m_new = jnp.maximum(m_new, s)
        m_safe = jnp.where(m_new == float("-inf"), 0.0, m_new)
        alpha = jnp.exp2((m_i - m_safe) * LOG2E)
        l_i, acc = l_i * alpha, [x * alpha for x in acc]
        for s, row in zip(lses, rows, strict=True):
            p = jnp.exp2((s - m_safe) * LOG2E)
            l_i = l_i + p
            row = [jnp.where(s > float("-inf"), x, 0.0) for x in row]
            acc = [x + p * y for x, y in zip(acc, row, strict=True)]
        return m_new, l_i, acc

    def row():
        # Softmax over the parts: their lse are the scores, their outputs the values.
        def visit(index, carry):
            lses, rows = [], []
            for i in range(block_states):
                part = (index * block_states + i) * WARPS + warp
                exists = part < num_states
                place = jnp.minimum(part, num_states - 1) * batches + batch
                s = lses_ref[place, head, token]
                lses.append(jnp.where(exists, s, float("-inf")))
                # Load without waiting for the lse, which says whether the part counts.
                rows.append([outs_ref[place, token, head, x].astype(jnp.float32) for x in columns])
            return merge(*carry, lses, rows)

        nothing = jnp.float32(float("-inf")) + 0.0 * program
        zero = 0.0 * program.astype(jnp.float32)
        acc = [zero for _ in columns]
        steps = pl.cdiv(num_states, WARPS * block_states)
        m_i, l_i, acc = lax.fori_loop(0, steps, visit, (nothing, zero, acc))

        # Merge the warps' results.
        store_number(m_i, numbers, warp, 0)
        store_number(l_i, numbers, warp, 1)
        for x, column in zip(acc, columns, strict=True):
            store_number(x, parts, warp, column)
        warpgroup_barrier()

        @pl.when(warp == 0)
        def _():
            lses = [numbers[i, 0] for i in range(WARPS)]
            m_i = lses[0]
            for s in lses[1:]:
                m_i = jnp.maximum(m_i, s)
            m_safe = jnp.where(m_i == float("-inf"), 0.0, m_i)
            l_i, acc = zero, [zero for _ in columns]
            for i, s in enumerate(lses):
                alpha = jnp.exp2((s - m_safe) * LOG2E)
                l_i = l_i + numbers[i, 1] * alpha
                acc = [x + parts[i, y] * alpha for x, y in zip(acc, columns, strict=True)]

            # Normalise and store.
            if sinks_ref is not None:
                alpha, m_i, l_i = add_sink(sinks_ref[head], m_i, l_i, in_base_2=False)
                acc = [x * alpha for x in acc]
            l_safe, lse = row_statistics(m_i, l_i, in_base_2=False)
            store_number(lse, lse_ref, batch, head, token)
            for x, column in zip(acc, columns, strict=True):
                out = (x / l_safe).astype(out_ref.dtype)
                store_number(out, out_ref, batch, token, head, column)

    if block_keys is None:
        row()
    else:
        pl.when(num_states > 1)(row)


def combine(outs: Array, lses: Array, spec: MergeSpec, backend: Backend) -> tuple[Array, Array]:
    outs, lses = (x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in (outs, lses))
    return _launch(outs, lses, None, None, (), spec, backend)


def merge_splits(
    outs: Array,
    lses: Array,
    out: Array,
    lse: Array,
    operands: DecodeOperands[Array],
    spec: DecodeSpec,
    block_kv: int,
    backend: Backend,
) -> tuple[Array, Array]:
    """Call `combine_kernel` on the splits of a paged decode; it updates out and lse in place."""
    states = spec.merge(outs.shape[0] // spec.batch)
    sinks, seq_lens = operands.sinks, operands.seq_lens
    return _launch(outs, lses, sinks, seq_lens, (out, lse), states, backend, spec, block_kv)


def _launch(
    outs: Array,
    lses: Array,
    sinks: Array | None,
    seq_lens: Array | None,
    results: tuple[Array, ...],
    spec: MergeSpec,
    backend: Backend,
    decode: DecodeSpec | None = None,
    block_keys: int | None = None,
) -> tuple[Array, Array]:
    return launch(
        "combine",
        combine_kernel,
        lambda config: spec.heads * spec.tokens * spec.batch,
        (outs, lses, sinks, seq_lens),
        (
            jax.ShapeDtypeStruct(
                (spec.batch, spec.tokens, spec.heads, spec.head_dim_v), jnp.dtype(spec.dtype)
            ),
            jax.ShapeDtypeStruct((spec.batch, spec.heads, spec.tokens), jnp.float32),
        ),
        lambda config: (
            plgpu.SMEM((WARPS, spec.head_dim_v), jnp.float32),
            plgpu.SMEM((WARPS, 2), jnp.float32),
        ),
        spec,
        backend,
        problem={
            "tokens": spec.tokens,
            "capacity": 0 if decode is None else decode.cache.capacity,
            "window_left": None if decode is None else decode.bounded_window.left,
            "block_keys": block_keys,
        },
        aliased=results,
    )
