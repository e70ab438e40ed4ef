"""Trees of new tokens: which keys of a sequence's new tokens a query sees beside the older keys."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from twin_attention.contract.operands import DecodeOperands, PagedOperands


class TreeEnds(NamedTuple):
    """The ends of new tokens, int32: token u is seen by the tokens from u to before ``ends[u]``.

    Attributes:
        ends: [B, T], or [Tq] of packed tokens.
        stride: from one sequence's ends to the next one's, or from one packed token's.
    """

    ends: Any
    stride: Any = None


@triton.jit
def tree_mask(s, ends_ptr, token, new, exists):
    """Set the scores of keys that a token of a tree does not see to -inf.

    It sees the keys before the new tokens, and of these u if ``u <= token < ends[u]``: its
    ancestors and itself. A key that does not exist comes after all tokens.

    Args:
        s: scores of rows of q and rows of k.
        ends_ptr: the end of the sequence's first new token.
        token: which new token each row of q is.
        new: which new token each key is, negative for a key before them.
        exists: which keys do.
    """
    end = tl.load(ends_ptr + new, mask=exists & (new >= 0), other=2147483647)
    seen = (new[None, :] <= token[:, None]) & (token[:, None] < end[None, :])
    return tl.where(seen, s, float("-inf"))


def ends_of(operands: DecodeOperands[Tensor] | PagedOperands[Tensor]) -> TreeEnds | None:
    """Return the tree among the operands; the stride is to be added."""
    return None if operands.tree_ends is None else TreeEnds(operands.tree_ends)


def tree_argument(tree: TreeEnds | None) -> TreeEnds | None:
    """Return the tree as kernels take it, of the layout of its ends."""
    return None if tree is None else tree._replace(stride=tree.ends.strides[0])
