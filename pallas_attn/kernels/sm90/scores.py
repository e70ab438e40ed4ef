"""Scores: the way from q·k to what the softmax takes, without the derivative of a cap."""

import jax.numpy as jnp
from jax import lax

from pallas_attn.kernels.sm80.scores import iota, tanh
from pallas_attn.kernels.sm90.pipeline import WGMMA
from pallas_attn.kernels.sm90.workarounds import hide


def scaled_scores(s, rule):
    """Scale products q·k, in registers, where the exponent cannot do it, and cap them."""
    if rule.scale_first:
        s = s * rule.scale
    if rule.softcap is not None:
        s = rule.softcap * tanh(s * (1.0 / rule.softcap), WGMMA)
    return s


def hide_keys(s, position, start_kv, end, window_left, window_right, rows_of_query=1):
    """Set the scores of keys that a query does not see to -inf: `portable.scores.attention_mask`.

    The window's end and the last key are one bound.

    Args:
        s: [64, keys], of the keys from `start_kv` on.
        position: the key position of the first query.
        end: keys from this one on do not exist; None where all do.
        window_left, window_right: None for no bound.
        rows_of_query: how many rows a query has, one after the other.
    """
    row = iota((s.shape[0], 8), 0, WGMMA)
    if rows_of_query > 1:
        row = lax.div(row, rows_of_query)
    row = row + (position - start_kv)
    column = iota((s.shape[0], 8), 1, WGMMA)
    upper = lower = None
    if window_right is not None:
        upper = row + window_right - column
    if end is not None:
        last = (end - 1 - start_kv) - column
        upper = last if upper is None else jnp.minimum(upper, last)
    if window_left is not None:
        lower = row - window_left - column
    return hide(s, upper, lower)


def hide_queries(s, first_key, start_q, end, window_left, window_right):
    """Set the scores of queries that do not see a key to -inf: `hide_keys`, of transposed scores.

    Args:
        s: [64, queries], of the queries from `start_q` on.
        first_key: the first key, counted as queries are.
        end: keys from this one on do not exist; None where all do.
        window_left, window_right: None for no bound.
    """
    row = iota((s.shape[0], 8), 0, WGMMA)
    column = iota((s.shape[0], 8), 1, WGMMA)
    key = row + (first_key - start_q) - column
    upper = None if window_left is None else key + window_left
    lower = None if window_right is None else key - window_right
    if end is not None:
        exists = row < end - first_key
        lower = jnp.where(exists, -(2**30) if lower is None else lower, 2**30)
    return hide(s, upper, lower)
