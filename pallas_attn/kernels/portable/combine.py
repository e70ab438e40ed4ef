"""Merge attention over disjoint sets of keys into attention over their union."""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_attn.integers import quotient, remainder
from pallas_attn.kernels.library.pages import keys_of_sequence, load_rows_at, splits_with_keys
from pallas_attn.kernels.library.softmax import LOG2E, add_sink, row_statistics
from pallas_attn.kernels.library.tiles import arange, cdiv, load_rows
from pallas_attn.launch import ALL, COLUMNS, block_spec, launch
from twin_attention.contract.operands import DecodeOperands, PagedOperands
from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.contract.spec import MergeSpec
from twin_attention.targets.config import padded_head_dim
from twin_attention.targets.family import Backend


def combine_kernel(
    outs_ref,
    lses_ref,
    _out_ref,
    _lse_ref,
    sink_ref,
    len_ref,
    out_ref,
    lse_ref,
    *,
    tokens,
    num_states,
    capacity,
    window_left,
    head_dim_v,
    block_dv,
    block_keys,
    block_states,
):
    """One program merges one row.

    Operands, of this program's row: outs [N, Dv], lses [N] (float32, natural log); the head's sink
    [] float32 or None; len [] int32; out [Dv] and lse []. Grid: (heads and tokens, batch), heads
    fastest; only the first axis can exceed 65535 programs. With block_keys, out and lse are inputs
    as well.
    """
    # Locate the row.
    if block_keys is not None:
        begin, end = keys_of_sequence(len_ref, capacity, tokens, window_left)
        num_states = splits_with_keys(begin, end, num_states, block_keys)

    @pl.when(block_keys is None or num_states > 1)
    def _():
        # Softmax over the parts: their lse are the scores, their outputs the values.
        def visit(index, carry):
            m_i, l_i, acc = carry
            start = lax.convert_element_type(index, jnp.int32) * block_states
            part = start + arange(block_states)
            is_part = part < num_states
            s = load_rows(lses_ref, start, num_states, block_states, float("-inf"))
            # Loaded without waiting for the lse, which says whether it counts.
            x = load_rows_at(outs_ref, (part,), is_part, head_dim_v, block_dv)
            x = jnp.where((s > float("-inf"))[:, None], x.astype(jnp.float32), 0.0)
            m_new = jnp.maximum(m_i, jnp.max(s, 0))
            m_safe = jnp.where(m_new == float("-inf"), 0.0, m_new)
            p = jnp.exp2((s - m_safe) * LOG2E)
            alpha = jnp.exp2((m_i - m_safe) * LOG2E)
            acc = acc * alpha + jnp.sum(p[:, None] * x, 0)
            l_i = l_i * alpha + jnp.sum(p, 0)
            return m_new, l_i, acc

        m_i, l_i = jnp.float32(float("-inf")), jnp.float32(0.0)
        acc = jnp.zeros((block_dv,), jnp.float32)
        m_i, l_i, acc = lax.fori_loop(0, cdiv(num_states, block_states), visit, (m_i, l_i, acc))

        # Normalise and store.
        if sink_ref is not None:
            alpha, m_i, l_i = add_sink(sink_ref[...], m_i, l_i, in_base_2=False)
            acc = acc * alpha
        l_safe, lse = row_statistics(m_i, l_i, in_base_2=False)
        cols = arange(block_dv)
        out = (acc / l_safe).astype(out_ref.dtype)
        plt.store(out_ref.at[cols], out, mask=cols < head_dim_v)
        lse_ref[...] = lse


def combine(outs: Array, lses: Array, spec: MergeSpec, backend: Backend) -> tuple[Array, Array]:
    return _launch(outs, lses, None, None, None, None, spec, backend)


def merge_splits(
    outs: Array,
    lses: Array,
    out: Array | None,
    lse: Array | None,
    operands: DecodeOperands[Array] | PagedOperands[Array],
    spec: DecodeSpec,
    block_kv: int | None,
    backend: Backend,
) -> tuple[Array, Array]:
    """Call `combine_kernel` on the splits of a paged decode; it writes into out and lse.

    If every split has written its part, block_kv, out and lse are None.
    """
    states = spec.merge(len(outs))
    sinks, seq_lens = operands.sinks, None if block_kv is None else operands.seq_lens
    return _launch(outs, lses, out, lse, sinks, seq_lens, states, backend, spec, block_kv)


def _launch(
    outs: Array,
    lses: Array,
    out: Array | None,
    lse: Array | None,
    sinks: Array | None,
    seq_lens: Array | None,
    spec: MergeSpec,
    backend: Backend,
    decode: DecodeSpec | None = None,
    block_keys: int | None = None,
) -> tuple[Array, Array]:
    rows = (spec.batch, spec.tokens, spec.heads)
    results = (
        jax.ShapeDtypeStruct((*rows, spec.head_dim_v), jnp.dtype(spec.dtype)),
        jax.ShapeDtypeStruct((spec.batch, spec.heads, spec.tokens), jnp.float32),
    )
    block_dv = padded_head_dim(spec.head_dim_v)

    def place(row, batch):
        token, head = quotient(row, spec.heads), remainder(row, spec.heads)
        return {"batch": batch, "token": token, "head": head}

    def of(x, *axes):
        return block_spec(x, place, *axes)

    of_out, of_lse = ("batch", "token", "head", COLUMNS), ("batch", "head", "token")
    operands = (outs, lses, out, lse, sinks, seq_lens)
    capacity = 0 if decode is None else decode.cache.capacity
    left = None if decode is None else decode.window_left
    return launch(
        "combine",
        combine_kernel,
        lambda config: (spec.heads * spec.tokens, spec.batch),
        operands,
        (
            of(outs, ALL, *of_out),
            of(lses, ALL, *of_lse),
            of(out, *of_out),
            of(lse, *of_lse),
            of(sinks, "head"),
            of(seq_lens, "batch"),
        ),
        results,
        (of(results[0], *of_out), of(results[1], *of_lse)),
        {
            "tokens": spec.tokens,
            "num_states": spec.num_states,
            "capacity": capacity,
            "window_left": None if left is None else min(left, capacity),
            "head_dim_v": spec.head_dim_v,
            "block_dv": block_dv,
            "block_keys": block_keys,
        },
        spec,
        backend,
        aliases=None if out is None else {2: 0, 3: 1},
    )
