"""The running softmax, in base 2: ``exp(x) = exp2(x * log2(e))`` is one hardware instruction.

`exp2_scale` takes a score to base 2, and includes the scale where it can
(`twin_attention.contract.spec.ScoreRule`). Where terms are ADDED, a score may be huge, such as -1e9
for a hidden key, and rounding its product would change p. So the maximum stays a score, and is
subtracted first.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def online_softmax_update(s, m_i, l_i, exp2_scale, ADDED: tl.constexpr = False):
    """Update the running softmax (Milakov and Gimelshein 2018; FlashAttention-2, algorithm 1).

    Invariant: m_i is the row maximum so far, in base 2, or the score itself where terms are ADDED;
    l_i is the sum of ``exp2(s * exp2_scale - m_i)``, or ``exp2((s - m_i) * exp2_scale)``, and acc
    the product of that with v. Without a key so far m_i is -inf and l_i 0.

    Return (p, alpha, m_i, l_i): alpha rescales acc to the new maximum.
    """
    if ADDED:
        m_new = tl.maximum(m_i, tl.max(s, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2((s - m_safe[:, None]) * exp2_scale)
        alpha = tl.exp2((m_i - m_safe) * exp2_scale)
    else:
        m_new = tl.maximum(m_i, tl.max(s, 1) * exp2_scale)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s * exp2_scale - m_safe[:, None])
        alpha = tl.exp2(m_i - m_safe)
    l_i = l_i * alpha + tl.sum(p, 1)
    return p, alpha, m_new, l_i


@triton.jit
def row_statistics(m_i, l_i, ADDED: tl.constexpr = False):
    """Return acc's divisor and the natural log-sum-exp: 1 and -inf without a key."""
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)
    maximum = m_i if ADDED else m_i * LN2
    return l_safe, maximum + tl.log(l_safe)


@triton.jit
def rest_of_lse(lse, m_i, l_safe):
    """Return what float32 cannot hold of ``lse = m_i + log(l_safe)``; 0 without a key.

    Next to a maximum of -1e9 all of log(l_safe) is lost, and p of n equal scores would be 1, not 1
    / n (Knuth 1997, the error of a sum).
    """
    log_l = tl.log(l_safe)
    kept = lse - m_i
    rest = (m_i - (lse - kept)) + (log_l - kept)
    return tl.where(lse == float("-inf"), 0.0, rest)


@triton.jit
def load_lse(lse2_ptr, terms, first, rows):
    """Load lse2 and rest2: lse in base 2 and 0, or with terms lse and `rest_of_lse`."""
    rest2 = 0
    if terms.rest2 is not None:
        rest2 = tl.load(terms.rest2 + first + rows)
    return tl.load(lse2_ptr + first + rows), rest2


@triton.jit
def load_forward_lse(lse_ptr, terms, first, rows, exists):
    """Load what `load_lse` does from a forward's lse, and its rest as terms.rest2.

    A row that saw no key or does not exist has +inf, so that its p are 0.
    """
    lse = tl.load(lse_ptr + first + rows, mask=exists, other=float("inf"))
    lse2, rest2 = tl.where(lse == float("-inf"), float("inf"), lse), 0
    if terms.rest2 is None:
        lse2 *= LOG2E
    else:
        rest2 = tl.load(terms.rest2 + first + rows, mask=exists, other=0.0) * LOG2E
    return lse2, rest2


@triton.jit
def probabilities(s, lse2, rest2, terms, exp2_scale, OF_KEYS: tl.constexpr = False):
    """Compute p = exp(s - lse), with queries down, or keys down with OF_KEYS."""
    lse2 = lse2[None, :] if OF_KEYS else lse2[:, None]
    if terms.rest2 is None:
        exponent = s * exp2_scale - lse2
    else:
        rest2 = rest2[None, :] if OF_KEYS else rest2[:, None]
        exponent = (s - lse2) * exp2_scale - rest2
    return tl.exp2(exponent)


@triton.jit
def add_sink(sink, m_i, l_i, ADDED: tl.constexpr = False):
    """Add a logit without a value (Xiao et al. 2023); return (alpha, m_i, l_i)."""
    scale: tl.constexpr = LOG2E if ADDED else 1.0
    sink = sink if ADDED else sink * LOG2E
    m_new = tl.maximum(m_i, sink)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2((m_i - m_safe) * scale)
    l_i = l_i * alpha + tl.exp2((sink - m_safe) * scale)
    return alpha, m_new, l_i
