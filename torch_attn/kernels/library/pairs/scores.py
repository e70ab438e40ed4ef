"""From q and k to the input of the softmax."""

import triton
import triton.language as tl

from torch_attn.kernels.library.intervals import in_interval
from torch_attn.kernels.library.query_ranges import in_ranges
from torch_attn.kernels.library.scores import attention_mask, attention_scores, softcap_derivative
from torch_attn.kernels.library.terms import added_scores, store_bias_tile
from torch_attn.kernels.library.tree import in_branch


@triton.jit
def pair_scores(
    a, b, mask, terms, rule, rows, others, left, right, MASKED: tl.constexpr,
    OF_KEYS: tl.constexpr = False, ANY_START: tl.constexpr = False,
):  # fmt: skip
    """Compute a tile's scores; everything that changes or hides a score is applied here.

    a, b: the own and the visited rows. MASKED: the tile has hidden keys. OF_KEYS: the own rows are
    keys. ANY_START: others may begin before the first key. Return (s, dcap), float32: a · bᵀ
    scaled, with terms, capped and masked; and the cap's derivative, or 1.
    """
    seen = None
    if MASKED and mask.intervals is not None:
        seen = in_interval(rows, others)
    elif MASKED and mask.tree is not None:
        seen = in_branch(mask, rows, others, OF_KEYS, ANY_START)
    added = added_scores(terms, rows, others, MASKED or OF_KEYS, OF_KEYS)
    s = attention_scores(
        a, b, rule.scale, rule.softcap, rule.scale_first, rule.precision, None, added
    )
    dcap = 1.0
    if rule.softcap is not None:
        # What is added to a hidden pair may be NaN.
        dcap = tl.maximum(softcap_derivative(s, rule.softcap), 0.0)
    if MASKED or mask.segments is not None:
        shown = s
        # Rows of keys past the end are not stored.
        own, other = (rows.rows + rows.diagonal)[:, None], others.rows[None, :]
        if OF_KEYS:
            s = attention_mask(s, other, own, None, left, right)
        elif ANY_START or mask.segments is not None:
            s = attention_mask(s, own, other, None, left, right)
        else:
            s = attention_mask(s, own, other, rows.size_other, left, right)
        if mask.q_ranges is not None:
            in_range = in_ranges(mask, rows, others, OF_KEYS, ANY_START)
            s = tl.where(in_range, shown, s)
            if seen is not None:
                seen |= in_range
    if mask.segments is not None:
        s = tl.where(rows.ids[:, None] == others.ids[None, :], s, float("-inf"))
    if seen is not None:
        s = tl.where(seen, s, float("-inf"))
    if ANY_START:
        s = tl.where(others.exists[None, :], s, float("-inf"))
    return s, dcap


@triton.jit
def pair_tangents(q, k, dq, dk, dterms, rule, rows, keys, MASKED: tl.constexpr):
    """Compute the tangent of a tile's scores before the cap, float32; dq and dk may be None."""
    ds = tl.zeros([rows.rows.shape[0], keys.rows.shape[0]], tl.float32)
    if dq is not None:
        ds = tl.dot(dq, tl.trans(k), ds, input_precision=rule.precision)
    if dk is not None:
        ds = tl.dot(q, tl.trans(dk), ds, input_precision=rule.precision)
    ds = ds * rule.scale
    added = added_scores(dterms, rows, keys, MASKED, False)
    for i in tl.static_range(len(added)):
        ds = ds + added[i]
    return ds


@triton.jit
def store_gradients(terms, ds, queries, keys):
    """Store a tile's part of the gradients of terms that no two pairs share."""
    if terms.dbias.entries is not None:
        store_bias_tile(
            terms.dbias, ds, queries.element, queries.head, queries.start, keys.start, queries.end,
            queries.size_other, ds.shape[0], ds.shape[1],
        )  # fmt: skip
