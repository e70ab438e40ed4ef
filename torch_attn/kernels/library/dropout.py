"""Dropout: the weights that multiply probabilities (`twin_attention.contract.dropout`)."""

import triton
import triton.language as tl

from twin_attention.contract import dropout

ROUNDS = tl.constexpr(dropout.ROUNDS)
MULTIPLIERS = tl.constexpr(dropout.MULTIPLIERS)
WEYL = tl.constexpr(dropout.WEYL)


@triton.jit
def kept_pairs(terms, rows, others, OF_KEYS: tl.constexpr = False, ANY_START: tl.constexpr = False):
    """Return a tile's dropout weights, [BLOCK, BLOCK_OTHER] float32; 1 without dropout.

    Without ANY_START, tiles start at multiples of their sizes in the sequence. If one thread has
    all eight pairs of a block, they are drawn once.
    """
    weights = 1.0
    if terms.seed is not None:
        BLOCK: tl.constexpr = rows.rows.shape[0]
        BLOCK_OTHER: tl.constexpr = others.rows.shape[0]
        BLOCK_Q: tl.constexpr = BLOCK_OTHER if OF_KEYS else BLOCK
        BLOCK_KV: tl.constexpr = BLOCK if OF_KEYS else BLOCK_OTHER
        start_q, start_kv = rows.start - rows.first, others.start
        if OF_KEYS:
            start_q, start_kv = start_kv, start_q
        query, key = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_KV)
        first = tl.cast(start_kv, tl.int32)
        block_q, block_kv = tl.cast(start_q, tl.int32) // 16 * 8, first // 32 * 8
        if ANY_START or BLOCK_KV % 32 != 0:
            key += first
            block_kv = 0
        if OF_KEYS:
            query, key = query[None, :], key[:, None]
        else:
            query, key = query[:, None], key[None, :]
        element, head = tl.cast(rows.element, tl.uint32), tl.cast(others.head, tl.uint32)
        if terms.of_part:
            element += tl.load(terms.seed + 2).to(tl.uint32, bitcast=True)
            head += tl.load(terms.seed + 3).to(tl.uint32, bitcast=True)
        w0, w1, w2, w3 = philox(
            element,
            head,
            (block_q + query // 16 * 8 + query % 8).to(tl.uint32),
            (block_kv + key // 32 * 8 + key % 8).to(tl.uint32),
            tl.load(terms.seed).to(tl.uint32, bitcast=True),
            tl.load(terms.seed + 1).to(tl.uint32, bitcast=True),
        )
        lower = tl.where(key // 8 % 2 == 0, w0, w1)
        upper = tl.where(key // 8 % 2 == 0, w2, w3)
        bits = tl.where(query // 8 % 2 == 0, lower, upper)
        # Only the upper half matters below.
        bits = tl.where(key // 16 % 2 == 0, bits << 16, bits)
        threshold = tl.cast(terms.dropout.threshold, tl.uint32) << 16
        weights = tl.where(bits >= threshold, terms.dropout.scale, 0.0)
    return weights


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Return the words of Philox 4x32 (Salmon et al. 2011), all uint32."""
    for _ in tl.static_range(ROUNDS):
        high0, low0 = _product(c0, MULTIPLIERS[0])
        high1, low1 = _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += WEYL[0]
        k1 += WEYL[1]
    return c0, c1, c2, c3


@triton.jit
def _product(x, multiplier: tl.constexpr):
    """Return both halves of a product: one instruction gives both."""
    product = x.to(tl.uint64) * multiplier
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)
