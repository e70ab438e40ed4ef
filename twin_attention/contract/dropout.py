"""Dropout: which probabilities are dropped, the same bits wherever they are computed.

Philox 4x32 with 7 rounds takes the seed as its key. Its counter is made of batch element, query
head, and blocks of queries and keys. A call gives 16 bits for each of 8 pairs: queries i and i + 8
with keys j, j + 8, j + 16 and j + 24. In a tensor core's layout one thread holds these pairs, so it
draws once for all.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", table 2: 7 rounds are the
fewest that pass BigCrush.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from array_api_compat import device, is_jax_array

Array = Any

ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
LEVELS = 1 << 16  # a rate is rounded to a multiple of 1 / LEVELS


class DropoutRule(NamedTuple):
    """Say which probabilities are dropped, and what the others are multiplied by.

    threshold: a pair is dropped if its 16 bits are below this, from 1 to 65535.
    scale: one over the share that is kept.
    """

    threshold: int
    scale: float

    @classmethod
    def of(cls, rate: float) -> DropoutRule | None:
        """Return the rule of a rate; None for one that rounds to 0."""
        threshold = min(round(rate * LEVELS), LEVELS - 1)
        return cls(threshold, LEVELS / (LEVELS - threshold)) if threshold else None


def dropout_weights(
    xp: Any, seed: Array, counters: tuple[Array, Array, Array, Array], rule: DropoutRule, dtype: Any
) -> Array:
    """Return the factors of probabilities: 0 if dropped, otherwise the scale.

    seed: [2] int32 or uint32; or [4], where the last two are the batch element and query head that
        `counters` count from.
    counters: batch element, query head, query and key of each probability, counted from the first
        of their sequence; integers that broadcast.
    """
    word = _word(xp, seed)
    batch, head, query, key = (xp.astype(x, word) for x in counters)
    if seed.shape[0] == 4:
        batch, head = batch + xp.astype(seed[2], word), head + xp.astype(seed[3], word)
    blocks = query // 16 * 8 + query % 8, key // 32 * 8 + key % 8
    found = philox(xp, (batch, head, *blocks), (seed[0], seed[1]))
    lower = xp.where(key // 8 % 2 == 0, found[0], found[1])
    upper = xp.where(key // 8 % 2 == 0, found[2], found[3])
    bits = xp.where(query // 8 % 2 == 0, lower, upper)
    bits = xp.where(key // 16 % 2 == 0, bits & 0xFFFF, bits >> 16)
    scale = xp.full(bits.shape, rule.scale, dtype=dtype, device=device(bits))
    return xp.where(bits >= rule.threshold, scale, xp.zeros_like(scale))


def philox(
    xp: Any,
    counter: tuple[Array, Array, Array, Array],
    key: tuple[Array, Array],
    rounds: int = ROUNDS,
) -> tuple[Array, Array, Array, Array]:
    """Return the four 32-bit words of Philox 4x32 for each counter and key.

    Not every array library has 64-bit or unsigned numbers, hence the 16-bit pieces.
    """
    word = _word(xp, counter[3])
    low = xp.asarray(0xFFFF, dtype=word, device=device(counter[3]))
    c0, c1, c2, c3 = counter
    keys = [_unsigned(xp, x, word) for x in key]
    for _ in range(rounds):
        (high0, low0), (high1, low1) = (
            _product(x, multiplier, low)
            for x, multiplier in zip((c0, c2), MULTIPLIERS, strict=True)
        )
        c0, c1, c2, c3 = high1 ^ c1 ^ keys[0], low1, high0 ^ c3 ^ keys[1], low0
        keys = [_sum(x, step, low) for x, step in zip(keys, WEYL, strict=True)]
    return c0, c1, c2, c3


def _word(xp: Any, x: Array) -> Any:
    """Return a dtype that holds 32 unsigned bits: torch has no such dtype to compute with."""
    return xp.uint32 if is_jax_array(x) else xp.int64


def _unsigned(xp: Any, x: Array, word: Any) -> Array:
    low = xp.asarray(0xFFFF, dtype=word, device=device(x))
    x = xp.astype(x, word)
    return (x >> 16 & low) << 16 | (x & low)


def _product(x: Array, multiplier: int, low: Array) -> tuple[Array, Array]:
    a, b = x >> 16, x & low
    c, d = multiplier >> 16, multiplier & 0xFFFF
    of_low, first, second = b * d, a * d, b * c
    middle = (of_low >> 16) + (first & low) + (second & low)
    upper = a * c + (first >> 16) + (second >> 16) + (middle >> 16)
    return upper, (middle & low) << 16 | (of_low & low)


def _sum(x: Array, step: int, low: Array) -> Array:
    lower = (x & low) + (step & 0xFFFF)
    upper = (x >> 16) + (step >> 16) + (lower >> 16)
    return (upper & low) << 16 | (lower & low)
