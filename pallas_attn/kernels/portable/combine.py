"""Merge attention over disjoint sets of keys into attention over their union.

``lse = log Σ exp lse_n`` and ``out = Σ exp(lse_n - lse) out_n``. Flash-Decoding's second step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_attn.kernels.portable.pages import keys_of_sequence, load_rows_at, share_of_tiles
from pallas_attn.kernels.portable.softmax import LN2, LOG2E, add_sink
from pallas_attn.kernels.portable.tiles import arange, cdiv, load_rows
from pallas_attn.launch import launch
from twin_attention.contract.spec import DecodeSpec, MergeSpec
from twin_attention.targets.config import padded_head_dim


def combine_kernel(*refs, num_states, head_dim_v, block_dv, block_kv):
    """One program merges one row.

    Operands, of this program's row: outs [N, Dv], lses [N] (float32, natural log), the head's
    sink [] if there are sinks (float32); out [Dv] and lse []. Grid: (heads, tokens, batch). A part
    whose lse is -inf has no keys: its output does not count, and may hold anything. Accumulation:
    float32, exponents in base 2, block_kv parts at a time.
    """
    # Locate the row.
    outs_ref, lses_ref, *sink_ref, out_ref, lse_ref = refs

    # Softmax over the parts: their lse are the scores, their outputs the values.
    def visit(index, carry):
        m_i, l_i, acc = carry
        start = lax.convert_element_type(index, jnp.int32) * block_kv
        part = start + arange(block_kv)
        s = load_rows(lses_ref, start, num_states, block_kv, float("-inf")) * LOG2E
        # Loaded without waiting for the lse, which says whether it counts.
        x = load_rows_at(outs_ref, (part,), part < num_states, head_dim_v, block_dv)
        x = jnp.where((s > float("-inf"))[:, None], x.astype(jnp.float32), 0.0)
        m_new = jnp.maximum(m_i, jnp.max(s, 0))
        m_safe = jnp.where(m_new == float("-inf"), 0.0, m_new)
        p = jnp.exp2(s - m_safe)
        alpha = jnp.exp2(m_i - m_safe)
        acc = acc * alpha + jnp.sum(p[:, None] * x, 0)
        return m_new, l_i * alpha + jnp.sum(p, 0), acc

    zero = jnp.float32(0.0)
    carry = jnp.float32(float("-inf")), zero, jnp.zeros((block_dv,), jnp.float32)
    m_i, l_i, acc = lax.fori_loop(0, pl.cdiv(num_states, block_kv), visit, carry)

    # Normalise and store.
    if sink_ref:
        alpha, m_i, l_i = add_sink(sink_ref[0][...], m_i, l_i)
        acc = acc * alpha
    l_safe = jnp.where(l_i == 0.0, 1.0, l_i)
    cols = arange(block_dv)
    plt.store(out_ref.at[cols], (acc / l_safe).astype(out_ref.dtype), mask=cols < head_dim_v)
    lse_ref[...] = m_i * LN2 + jnp.log(l_safe)


def merge_splits_kernel(
    len_ref, _, __, *refs, num_states, capacity, tokens, window_left, block_keys, block_kv, **sizes
):
    """`combine_kernel` on the splits of `paged_decode_kernel`, whose tiles have block_keys keys.

    Only those with keys are read, and where there is one at most the result is there already.
    """
    begin, end = keys_of_sequence(len_ref, capacity, tokens, window_left)
    _, share, total = share_of_tiles(begin, end, 0, num_states, block_keys)
    parts = cdiv(total, jnp.maximum(share, 1))

    @pl.when(parts > 1)
    def _():
        combine_kernel(*refs, num_states=parts, block_kv=block_kv, **sizes)


def combine(outs: Array, lses: Array, spec: MergeSpec, *, backend: str) -> tuple[Array, Array]:
    """Call `combine_kernel` on results over disjoint keys.

    Args:
        backend: "interpret", or the target to compile for, "sm80" or "sm90".

    Returns:
        out [B, S, H, Dv] in spec's dtype and lse [B, H, S] float32.
    """
    return _launch(combine_kernel, outs, lses, None, (), spec, {}, backend)


def merge_splits(
    outs: Array,
    lses: Array,
    out: Array,
    lse: Array,
    seq_lens: Array,
    sinks: Array | None,
    spec: DecodeSpec,
    block_kv: int,
    *,
    backend: str,
) -> tuple[Array, Array]:
    """Call `merge_splits_kernel`, which writes into out and lse.

    Args:
        sinks: [H] float32, one more logit a head in the denominator, or None.
        block_kv: keys of a tile of the decode.
        backend: "interpret", or the target to compile for, "sm80" or "sm90".

    Returns:
        out [B, T, Hq, Dv] in q's dtype and lse [B, Hq, T] float32.
    """
    left = spec.window_left
    splits = {
        "capacity": spec.cache.capacity,
        "tokens": spec.tokens,
        "window_left": None if left is None else min(left, spec.cache.capacity),
        "block_keys": block_kv,
    }
    into, merge = (seq_lens, out, lse), spec.merge(len(outs))
    return _launch(merge_splits_kernel, outs, lses, sinks, into, merge, splits, backend)


def _launch(
    kernel: Callable[..., None],
    outs: Array,
    lses: Array,
    sinks: Array | None,
    into: tuple[Array, ...],
    spec: MergeSpec,
    splits: dict[str, Any],
    backend: str,
) -> tuple[Array, Array]:
    """Call one of the kernels; `into` is empty, or lengths and the results to complete."""
    rows = (spec.batch, spec.tokens, spec.heads)
    out = jax.ShapeDtypeStruct((*rows, spec.head_dim_v), jnp.dtype(spec.dtype))
    lse = jax.ShapeDtypeStruct((spec.batch, spec.heads, spec.tokens), jnp.float32)
    block_dv = padded_head_dim(spec.head_dim_v)

    def of_row(head, token, batch):
        return batch, token, head, 0

    def of_lse(head, token, batch):
        return batch, head, token

    results = pl.BlockSpec((None, None, None, block_dv), of_row), pl.BlockSpec((None,) * 3, of_lse)
    operands = [*into, outs, lses]
    states = (spec.num_states, None, None, None)
    in_specs = [
        pl.BlockSpec((*states, block_dv), lambda *i: (0, *of_row(*i))),
        pl.BlockSpec(states, lambda *i: (0, *of_lse(*i))),
    ]
    if into:
        of_length = pl.BlockSpec((None,), lambda head, token, batch: (batch,))
        in_specs = [of_length, *results, *in_specs]
    if sinks is not None:
        operands.append(sinks)
        in_specs.append(pl.BlockSpec((None,), lambda head, token, batch: (head,)))
    return launch(
        "combine",
        kernel,
        lambda config: (spec.heads, spec.tokens, spec.batch),
        operands,
        in_specs,
        (out, lse),
        results,
        splits
        | {
            "num_states": spec.num_states,
            "head_dim_v": spec.head_dim_v,
            "block_dv": block_dv,
        },
        spec,
        backend,
        aliases={1: 0, 2: 1} if into else None,
    )
