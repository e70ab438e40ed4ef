"""Trees of new tokens: which of their keys a query sees in addition to the older keys.

A token sees new token u if ``u <= token < ends[u]``. `new` is negative for an older key, and past
all tokens for a nonexistent one.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from twin_attention.contract.operands import DecodeOperands, PagedOperands
from twin_attention.contract.paged_spec import PagedSpec


class TreeEnds(NamedTuple):
    """Ends of new tokens, [B, T] or [Tq] int32; `stride` is between sequences or packed tokens."""

    ends: Any
    stride: Any = None


class TokenMask(NamedTuple):
    """Hold what new tokens see besides a window: `TreeEnds` and `QueryRanges`, or None."""

    ends: Any
    bounds: Any
    stride: Any = None
    number: Any = None


@triton.jit
def tree_mask(s, ends_ptr, token, new, exists):
    """Hide keys that a token does not see; `ends_ptr` points to the sequence's first."""
    end = tl.load(ends_ptr + new, mask=exists & (new >= 0), other=2147483647)
    seen = (new[None, :] <= token[:, None]) & (token[:, None] < end[None, :])
    return tl.where(seen, s, float("-inf"))


@triton.jit
def tree_words(ends_ptr, token, TOKENS: tl.constexpr):
    """Return which of up to 64 TOKENS each row sees, as two words: tiles then load no ends."""
    low = _tree_word(ends_ptr, token, 0, TOKENS)
    high = low
    if TOKENS > 32:
        high = _tree_word(ends_ptr, token, 32, TOKENS)
    return low, high


@triton.jit
def _tree_word(ends_ptr, token, FIRST: tl.constexpr, TOKENS: tl.constexpr):
    bit = tl.arange(0, 32)
    new = FIRST + bit
    end = tl.load(ends_ptr + new, mask=new < TOKENS, other=0)
    seen = (new[None, :] <= token[:, None]) & (token[:, None] < end[None, :])
    return tl.sum(seen.to(tl.int32) << bit[None, :], 1)


@triton.jit
def tree_mask_of_words(s, words, new, TOKENS: tl.constexpr):
    word = words[0][:, None]
    if TOKENS > 32:
        word = tl.where(new[None, :] < 32, word, words[1][:, None])
    is_seen = (new < TOKENS)[None, :] & (((word >> (new & 31)[None, :]) & 1) != 0)
    return tl.where((new < 0)[None, :] | is_seen, s, float("-inf"))


def ends_of(operands: DecodeOperands[Tensor]) -> TreeEnds | None:
    return None if operands.tree_ends is None else TreeEnds(operands.tree_ends)


def mask_of(operands: PagedOperands[Tensor]) -> TokenMask:
    ranges = operands.q_ranges
    return TokenMask(operands.tree_ends, None if ranges is None else ranges.contiguous())


def mask_argument(mask: TokenMask, spec: PagedSpec) -> TokenMask:
    stride = None if mask.ends is None else mask.ends.strides[0]
    return mask._replace(stride=stride, number=tl.constexpr(spec.ranges))


def tree_argument(tree: TreeEnds | None) -> TreeEnds | None:
    return None if tree is None else tree._replace(stride=tree.ends.strides[0])
