"""Trees of new tokens: which new tokens' keys a query sees in addition to the older keys."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from twin_attention.contract.operands import DecodeOperands, PagedOperands


class TreeEnds(NamedTuple):
    """Hold the ends of new tokens, int32: tokens from u to before ``ends[u]`` see token u.

    Attributes:
        ends: [B, T], or [Tq] of packed tokens.
        stride: from one sequence's ends, or from one packed token's end, to the next.
    """

    ends: Any
    stride: Any = None


@triton.jit
def tree_mask(s, ends_ptr, token, new, exists):
    """Set to -inf the scores of keys that a tree's token does not see.

    A token sees the keys before the new tokens, and new token u if ``u <= token < ends[u]``: its
    ancestors and itself. A nonexistent key comes after all tokens.

    Args:
        s: scores of rows of q and rows of k.
        ends_ptr: points to the end of the sequence's first new token.
        token: which new token each row of q is.
        new: which new token each key is, negative for an older key.
        exists: which keys exist.
    """
    end = tl.load(ends_ptr + new, mask=exists & (new >= 0), other=2147483647)
    seen = (new[None, :] <= token[:, None]) & (token[:, None] < end[None, :])
    return tl.where(seen, s, float("-inf"))


@triton.jit
def tree_words(ends_ptr, token, TOKENS: tl.constexpr):
    """Return which new tokens each row's token sees, as bits: the first 32, and the others.

    A tile of keys then needs no load of ends, whose buffers would take shared memory.

    Args:
        ends_ptr, token: as `tree_mask` takes them.
        TOKENS: how many new tokens there are, at most 64.
    """
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
    """Set to -inf the scores of keys that a tree's token does not see, by its `tree_words`.

    Args:
        s, new: as `tree_mask` takes them. A nonexistent key comes after all tokens.
        words: what `tree_words` returned.
    """
    word = words[0][:, None]
    if TOKENS > 32:
        word = tl.where(new[None, :] < 32, word, words[1][:, None])
    is_seen = (new < TOKENS)[None, :] & (((word >> (new & 31)[None, :]) & 1) != 0)
    return tl.where((new < 0)[None, :] | is_seen, s, float("-inf"))


def ends_of(operands: DecodeOperands[Tensor] | PagedOperands[Tensor]) -> TreeEnds | None:
    """Return the tree among the operands; its stride is added later."""
    return None if operands.tree_ends is None else TreeEnds(operands.tree_ends)


def tree_argument(tree: TreeEnds | None) -> TreeEnds | None:
    """Return the tree as kernels take it, from the layout of its ends."""
    return None if tree is None else tree._replace(stride=tree.ends.strides[0])
