"""What per-call times of several rounds say: their middle, their range, and how rounds differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call.

    Attributes:
        median: median over the calls of a round, then over rounds.
        fastest, slowest: medians of the fastest and of the slowest round.
        p20, p80: percentiles over the calls of all rounds; None where calls were not kept.
    """

    median: float
    fastest: float
    slowest: float
    p20: float | None = None
    p80: float | None = None

    @property
    def spread(self) -> float:
        """How far rounds lie apart, as a fraction of the median."""
        return (self.slowest - self.fastest) / self.median

    @property
    def range(self) -> tuple[float, float]:
        """From the fastest round, or the 20th percentile, to the slowest, or the 80th."""
        bounds = [self.fastest, self.slowest, self.p20, self.p80]
        kept = [bound for bound in bounds if bound is not None]
        return min(kept), max(kept)


def summarize(rounds: Sequence[Sequence[float]]) -> Times:
    """Reduce the milliseconds of every call of every round.

    >>> summarize([[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]])
    Times(median=2.5, fastest=2.0, slowest=3.0, p20=2.0, p80=3.0)

    Raises:
        ValueError: there is no round, or a round without a call.
    """
    if not rounds or not all(rounds):
        raise ValueError(f"rounds: expected a call or more in each, got {rounds!r}")
    medians = [float(np.median(calls)) for calls in rounds]
    p20, p80 = map(float, np.percentile(np.concatenate(rounds), [20, 80]))
    return Times(float(np.median(medians)), min(medians), max(medians), p20, p80)
