"""Trees of tokens: which tokens are ancestors of which, as one number per token.

A tree's tokens are in depth-first order, so a token and its descendants are one range. The range's
end says who sees the token: a query at p sees key j if ``j <= p < ends[j]``, that is, if j is an
ancestor of p or p itself (FlashMask's causal form, Wang et al. 2024, arXiv 2410.01359).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import is_torch_array

from twin_attention.contract.validate.block_mask import check_tiles
from twin_attention.contract.validate.errors import fail, type_name
from twin_attention.contract.validate.offsets import check_offset_values


class Tree(NamedTuple):
    """Hold what attention and training need of a tree: NumPy arrays [T], or [B, T] for a batch.

    Padding, after the tokens of a shorter tree, is seen by no token and predicted by none.

    Args:
        ends: int32, the end of the range of each token's descendants; for padding, its own
            position.
        depths: int32, tokens on the path from the root to each token: its position for a rotary
            embedding. 0 for padding.
        parents: int32, the token whose logits predict each token; 0 if there is none, so that it is
            always an index.
        is_predicted: bool, False for a root and for padding: which tokens have a training loss.

    Example::

        import torch
        from torch_attn import tree_of

        tree = tree_of([-1, 0, 1, 0])  # a prompt and two continuations, one of them two tokens long
        tokens = torch.tensor([7, 3, 4, 5])
        logits = torch.randn(4, 10)
        losses = torch.nn.functional.cross_entropy(
            logits[torch.from_numpy(tree.parents)], tokens, reduction="none"
        )
        loss = losses[torch.from_numpy(tree.is_predicted)].mean()
    """

    ends: np.ndarray
    depths: np.ndarray
    parents: np.ndarray
    is_predicted: np.ndarray


def tree_of(parents: Any, lengths: Any = None, *, size: int | None = None) -> Tree:
    """Return the tree, token by token, of nodes given by their parents.

    A node is one token, or with `lengths` a segment of consecutive tokens, such as a prompt that
    several continuations share. A batch is a sequence of trees, which may have different sizes.

    Args:
        parents: [N] integers, the parent of each node, -1 for a root, in depth-first order. A list
            or a NumPy array; for a batch, one per tree.
        lengths: [N] integers, the number of tokens of each node, at least 0, structured as
            `parents`. None is one token each.
        size: tokens of a tree with its padding. None is the size of the longest tree.

    Returns:
        A `Tree` of [size] arrays, or [B, size] for a batch.

    Raises:
        TypeError: what is no integer.
        ValueError: a parent that is not on the path to the node before its child; a negative
            length, or a wrong number of lengths; a size less than the tokens of a tree.

    Source: Wang et al. 2024 (FlashMask).

    Example::

        from torch_attn import tree_of

        tree = tree_of([-1, 0, 0], lengths=[3, 2, 1])  # a prompt of 3 tokens, two continuations
        assert tree.ends.tolist() == [6, 6, 6, 5, 5, 6]
        assert tree.depths.tolist() == [0, 1, 2, 3, 4, 3]
        assert tree.parents.tolist() == [0, 0, 1, 2, 3, 2]

        batch = tree_of([[-1, 0, 0], [-1, 0]])
        assert batch.ends.tolist() == [[3, 2, 3], [2, 2, 2]]  # the last token is padding
    """
    if not _is_batch(parents):
        return _padded(_tokens_of(parents, lengths, ""), size)
    if lengths is not None and (not _is_batch(lengths) or len(lengths) != len(parents)):
        fail(ValueError, "lengths", f"the lengths of {len(parents)} trees", repr(lengths))
    trees = [
        _tokens_of(nodes, None if lengths is None else lengths[b], f"{b}, ")
        for b, nodes in enumerate(parents)
    ]
    if size is None:
        size = max(len(tree.ends) for tree in trees)
    return Tree(*map(np.stack, zip(*(_padded(tree, size) for tree in trees), strict=True)))


def check_tree(ends: Any, depths: Any = None, cu_seqlens: Any = None) -> None:
    """Check the ends of a tree, which attention itself does not check.

    It waits for the device and reads values: use it for debugging, not in a CUDA graph.

    Args:
        ends: [T], or [B, T] for a batch, integers: the end of the range of each token's
            descendants; a token's own position marks padding. An array of NumPy or of either
            framework.
        depths: integers of the same shape, the depth of each token; None checks no depths.
        cu_seqlens: [N + 1] integers, the offsets of trees packed in `ends` [T], then the end of the
            last tree. Ends count from the tree's first token; what follows the last offset is not
            checked. None is one tree.

    Raises:
        TypeError: what is no integer.
        ValueError: shapes that do not match; an end before its token, past the last one or past an
            ancestor's; a depth that is not one more than the parent's, or a root's that is
            negative; offsets as `check_offsets` refuses them. The message names the first such
            entry.

    Example::

        from torch_attn import check_tree, tree_of

        tree = tree_of([-1, 0, 1, 0])
        check_tree(tree.ends, tree.depths)
        try:
            check_tree([2, 3, 3])
        except ValueError as error:
            assert str(error) == "ends[1]: expected at most its ancestor's ends[0] = 2, got 3"
    """
    ends = integers_of("ends", ends)
    if ends.ndim not in (1, 2):
        fail(ValueError, "ends", "1 or 2 dimensions [T] or [B, T]", f"shape {ends.shape}")
    if depths is not None:
        depths = integers_of("depths", depths)
        if depths.shape != ends.shape:
            fail(ValueError, "depths", f"ends' shape {ends.shape}", depths.shape)
    bounds = np.array([0, ends.shape[-1]])
    if cu_seqlens is not None:
        bounds = integers_of("cu_seqlens", cu_seqlens)
        if ends.ndim != 1 or bounds.ndim != 1 or len(bounds) == 0:
            expected = "shape (N + 1,) beside ends [T]"
            fail(ValueError, "cu_seqlens", expected, f"{bounds.shape} beside ends {ends.shape}")
        check_offset_values("cu_seqlens", bounds, len(ends))
    for b in np.ndindex(ends.shape[:-1]):
        for first, last in pairwise(bounds):
            own = None if depths is None else depths[b][first:last]
            _check_values(ends[b][first:last], own, (*b, int(first)))


def _is_batch(x: Any) -> bool:
    if hasattr(x, "ndim"):
        return x.ndim == 2
    return isinstance(x, Sequence) and any(not isinstance(item, Integral) for item in x)


def _tokens_of(parents: Any, lengths: Any, where: str) -> Tree:
    """`where` is the index of a tree in its batch, for messages."""
    parents = integers_of("parents", parents)
    counts = np.ones_like(parents) if lengths is None else integers_of("lengths", lengths)
    if parents.ndim != 1:
        fail(ValueError, "parents", "a sequence of integers, or of trees", f"shape {parents.shape}")
    if counts.shape != parents.shape:
        fail(ValueError, "lengths", f"those of {len(parents)} nodes", f"shape {counts.shape}")
    for i in np.flatnonzero(counts < 0)[:1]:
        fail(ValueError, f"lengths[{where}{i}]", "a length from 0 on", counts[i])
    _check_order(parents, where)
    starts = np.cumsum(counts) - counts
    # For each node: the tokens of its ancestors; the token that its first token follows.
    above, before = np.zeros_like(counts), np.full_like(counts, -1)
    for i, parent in enumerate(parents.tolist()):
        if parent >= 0:
            has_tokens = counts[parent] > 0
            above[i] = above[parent] + counts[parent]
            before[i] = starts[parent] + counts[parent] - 1 if has_tokens else before[parent]
    below = counts.copy()  # tokens of a node and its descendants
    for i, parent in reversed([*enumerate(parents.tolist())]):
        if parent >= 0:
            below[parent] += below[i]
    token = np.arange(counts.sum())
    node = np.repeat(np.arange(len(counts)), counts)
    is_first = token == starts[node]
    parent = np.where(is_first, before[node], token - 1)
    return Tree(
        (starts + below)[node].astype(np.int32),
        (above[node] + token - starts[node]).astype(np.int32),
        np.maximum(parent, 0).astype(np.int32),
        parent >= 0,
    )


def _check_order(parents: np.ndarray, where: str) -> None:
    path: list[int] = []
    for i, parent in enumerate(parents.tolist()):
        while path and path[-1] != parent:
            path.pop()
        if parent != -1 and not path:
            expected = f"-1, or a node on the path to node {i - 1}" if i else "-1"
            fail(ValueError, f"parents[{where}{i}]", expected, parent)
        path.append(i)


def _padded(tree: Tree, size: int | None) -> Tree:
    tokens = len(tree.ends)
    if size is None:
        return tree
    check_tiles(size=size)
    if size < tokens:
        fail(ValueError, "size", f"at least the {tokens} tokens of a tree", size)
    ends, *rest = (np.pad(x, (0, size - tokens)) for x in tree)
    ends[tokens:] = np.arange(tokens, size)
    return Tree(ends, *rest)


def _check_values(ends: np.ndarray, depths: np.ndarray | None, where: tuple[int, ...]) -> None:
    """The tree's first token is at index `where` of `ends`."""
    *batch, first = where

    def at(name: str, i: int) -> str:
        return f"{name}[{', '.join(map(str, (*batch, first + i)))}]"

    for i in np.flatnonzero((ends < np.arange(len(ends))) | (ends > len(ends)))[:1]:
        fail(ValueError, at("ends", i), f"an end from {i} to {len(ends)}", ends[i])
    path: list[int] = []
    for i, end in enumerate(ends.tolist()):
        while path and ends[path[-1]] <= i:
            path.pop()
        if path and end > ends[path[-1]]:
            expected = f"at most its ancestor's {at('ends', path[-1])} = {ends[path[-1]]}"
            fail(ValueError, at("ends", i), expected, end)
        if end == i:  # padding
            continue
        if depths is not None and path and depths[i] != depths[path[-1]] + 1:
            parent = at("depths", path[-1])
            expected = f"{depths[path[-1]] + 1}, one more than its parent's {parent}"
            fail(ValueError, at("depths", i), expected, depths[i])
        if depths is not None and not path and depths[i] < 0:
            fail(ValueError, at("depths", i), "a depth from 0 on", depths[i])
        path.append(i)


def integers_of(name: str, x: Any) -> np.ndarray:
    found = x.numpy(force=True) if is_torch_array(x) else np.asarray(x)
    if found.size == 0 and not hasattr(x, "dtype"):
        return found.astype(np.int64)
    if found.dtype.kind not in "iu":
        got = type_name(x) if found.dtype == object else found.dtype
        fail(TypeError, name, "integers", got)
    return found.astype(np.int64)
