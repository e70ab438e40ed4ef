"""Problems with ranges of keys: a prefix, spans, or block diffusion."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from twin_attention.contract.ranges import block_diffusion_ranges, prefix_ranges, span_ranges
from twin_attention.contract.spec import AttentionSpec
from twin_attention.interop.parity.cases import FlashCase


@dataclass(frozen=True)
class RangeCase(FlashCase):
    """One causal call of `flash_attention` with ranges.

    pattern, size: "prefix" of that many tokens, "spans" or "diffusion" in blocks of that many.
    """

    pattern: str = "prefix"
    size: int = 1

    @property
    def spec(self) -> AttentionSpec:
        return replace(super().spec, ranges=self.bounds.shape[2])

    @cached_property
    def bounds(self) -> np.ndarray:
        """Return the ranges, [1, S, R, 2] int32."""
        if self.pattern == "prefix":
            return prefix_ranges([self.size], self.seq_q)
        if self.pattern == "spans":  # with as much text between them
            starts = np.arange(0, self.seq_q, 2 * self.size)[None]
            return span_ranges(starts, starts + self.size, self.seq_q)
        return block_diffusion_ranges(self.size, self.seq_q // 2)[None]
