"""Scores of pairs: from q and k to the input of the softmax."""

import jax.numpy as jnp

from pallas_attn.kernels.library.intervals import in_interval
from pallas_attn.kernels.library.query_ranges import in_ranges
from pallas_attn.kernels.library.scores import (
    attention_mask,
    attention_scores,
    dot,
    softcap_derivative,
)
from pallas_attn.kernels.library.terms import added_scores
from pallas_attn.kernels.library.tree import in_branch


def pair_scores(a, b, mask, terms, rule, rows, others, window, masked, of_keys=False):
    """Compute a tile's scores, with all that changes or hides them, and the cap's derivative."""
    added = added_scores(terms, rows, others, masked or of_keys, of_keys)
    s = attention_scores(
        a, b, rule.scale, rule.softcap, rule.scale_first, None, rule.precision, added
    )
    dcap = 1.0
    if rule.softcap is not None:
        # What is added to a hidden pair may be NaN.
        dcap = softcap_derivative(s, rule.softcap)
        dcap = jnp.where(dcap > 0.0, dcap, 0.0)
    if not masked and rows.ids is None:
        return s, dcap
    own, other = (rows.rows + rows.diagonal)[:, None], others.rows[None, :]
    position, key = (other, own) if of_keys else (own, other)
    # Rows of keys past the end are not stored; `ids` and `exists` hide visited ones.
    end = None if of_keys or others.exists is not None else rows.size_other
    shown, in_range = s, None
    s = attention_mask(s, position, key, end, window.left, window.right)
    if mask.q_ranges.bounds is not None:
        in_range = in_ranges(mask, rows, others, of_keys)
        s = jnp.where(in_range, shown, s)
    if rows.ids is not None:
        s = jnp.where(rows.ids[:, None] == others.ids[None, :], s, float("-inf"))
    elif others.exists is not None:
        s = jnp.where(others.exists[None, :], s, float("-inf"))
    if masked and rows.begins is not None:
        s = jnp.where(in_interval(rows, others), s, float("-inf"))
    if masked and mask.tree.ends is not None:
        seen = in_branch(mask, rows, others, of_keys)
        s = jnp.where(seen if in_range is None else seen | in_range, s, float("-inf"))
    return s, dcap


def pair_tangents(q, k, dq, dk, dterms, rule, rows, keys, masked):
    """Compute the tangent of a tile's scores before the cap, float32; dq and dk may be None."""
    ds = jnp.zeros((rows.rows.shape[0], keys.rows.shape[0]), jnp.float32)
    if dq is not None:
        ds = ds + dot(dq, k.T, rule.precision)
    if dk is not None:
        ds = ds + dot(q, dk.T, rule.precision)
    ds = ds * rule.scale
    for x in added_scores(dterms, rows, keys, masked, False):
        ds = ds + x
    return ds
