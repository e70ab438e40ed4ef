import inspect
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pallas_attn
import torch_attn
from twin_attention.contract.tree import Tree, check_tree, tree_of


@st.composite
def parents(draw, most=24):
    found: list[int] = []
    path: list[int] = []
    for i in range(draw(st.integers(0, most))):
        path = path[: draw(st.integers(0, len(path)))]
        found.append(path[-1] if path else -1)
        path.append(i)
    return found


@st.composite
def segments(draw):
    nodes = draw(parents(most=8))
    return nodes, [draw(st.integers(0, 4)) for _ in nodes]


def token_parents(nodes, lengths):
    found, last = [], {-1: -1}
    for i, (parent, length) in enumerate(zip(nodes, lengths, strict=True)):
        before = last[parent]
        for _ in range(length):
            found.append(before)
            before = len(found) - 1
        last[i] = before
    return found


def ancestors(of_token, p):
    found = []
    while p >= 0:
        found.append(p)
        p = of_token[p]
    return found


def parents_of(ends):
    """A token's parent is the last token before it whose range holds it."""
    return [max((j for j in range(p) if ends[j] > p), default=-1) for p in range(len(ends))]


@given(parents())
def test_a_query_sees_its_ancestors_and_itself(nodes):
    ends = tree_of(nodes).ends
    for p in range(len(nodes)):
        assert [j for j in range(len(nodes)) if j <= p < ends[j]] == ancestors(nodes, p)[::-1]


@given(parents())
def test_ends_nest_and_lead_back_to_the_parents(nodes):
    tree = tree_of(nodes)
    check_tree(tree.ends, tree.depths)
    assert parents_of(tree.ends) == nodes
    of_token = np.where(tree.is_predicted, tree.parents, -1)
    assert of_token.tolist() == nodes
    assert tree.depths.tolist() == [len(ancestors(nodes, p)) - 1 for p in range(len(nodes))]


@given(segments())
def test_segments_are_chains_of_tokens(drawn):
    by_segment, by_token = tree_of(*drawn), tree_of(token_parents(*drawn))
    for a, b in zip(by_segment, by_token, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


@given(st.lists(segments(), min_size=1, max_size=4), st.integers(0, 5))
def test_a_batch_is_its_trees_with_padding(drawn, more):
    nodes, lengths = zip(*drawn, strict=True)
    trees = [tree_of(*x) for x in drawn]
    size = max(len(tree.ends) for tree in trees) + more
    batch = tree_of(nodes, lengths, size=size)
    check_tree(batch.ends)
    for b, tree in enumerate(trees):
        tokens = len(tree.ends)
        for whole, own in zip(batch, tree, strict=True):
            np.testing.assert_array_equal(whole[b, :tokens], own, strict=True)
        assert batch.ends[b, tokens:].tolist() == [*range(tokens, size)]
        assert not batch.is_predicted[b, tokens:].any()
        assert not batch.parents[b, tokens:].any()


@given(st.lists(parents(most=6), max_size=4))
def test_packed_trees_count_from_their_first_token(nodes):
    trees = [tree_of(x) for x in nodes]
    ends, depths = (
        np.concatenate([[], *(getattr(tree, name) for tree in trees), [99]]).astype(np.int32)
        for name in ("ends", "depths")
    )
    check_tree(ends, depths, np.cumsum([0, *map(len, nodes)]))


def test_arrays_have_the_contract_s_dtypes():
    tree = tree_of([])
    assert [x.dtype for x in tree] == [np.int32, np.int32, np.int32, np.bool]
    assert tree.ends.shape == (0,)
    assert tree_of(np.array([[-1, 0], [-1, -1]])).ends.tolist() == [[2, 2], [1, 2]]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([0],), ValueError, "parents[0]: expected -1, got 0"),
        (([-1, 0, 0, 1],), ValueError,
         "parents[3]: expected -1, or a node on the path to node 2, got 1"),
        (([-1, -2],), ValueError,
         "parents[1]: expected -1, or a node on the path to node 0, got -2"),
        (([[-1], [-1, 1]],), ValueError,
         "parents[1, 1]: expected -1, or a node on the path to node 0, got 1"),
        (([-1.0],), TypeError, "parents: expected integers, got float64"),
        ((np.zeros((1, 1, 1), int),), ValueError,
         "parents: expected a sequence of integers, or of trees, got shape (1, 1, 1)"),
        (([-1, 0], [1, -1]), ValueError, "lengths[1]: expected a length from 0 on, got -1"),
        (([-1, 0], [1]), ValueError, "lengths: expected those of 2 nodes, got shape (1,)"),
        (([[-1], [-1]], [1, 1]), ValueError,
         "lengths: expected the lengths of 2 trees, got [1, 1]"),
        (([-1, 0], None, 1), ValueError, "size: expected at least the 2 tokens of a tree, got 1"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_tree_is_named(arguments, error, message):
    nodes, lengths, size = (*arguments, None, None)[:3]
    with pytest.raises(error) as caught:
        tree_of(nodes, lengths, size=size)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([2, 0],), "ends[1]: expected an end from 1 to 2, got 0"),
        (([2, 3],), "ends[1]: expected an end from 1 to 2, got 3"),
        (([2, 3, 3],), "ends[1]: expected at most its ancestor's ends[0] = 2, got 3"),
        (([[2, 2], [1, 0]],), "ends[1, 1]: expected an end from 1 to 2, got 0"),
        (([2, 2], [0, 2]), "depths[1]: expected 1, one more than its parent's depths[0], got 2"),
        (([1, 2], [0, -1]), "depths[1]: expected a depth from 0 on, got -1"),
        (([2, 2], [0]), "depths: expected ends' shape (2,), got (1,)"),
        (([1, 2, 3], None, [0, 1, 3]), "ends[2]: expected an end from 1 to 2, got 3"),
        (([1, 1], None, [0, 3]), "cu_seqlens[1]: expected an offset from 0 to 2, got 3"),
        (([[1]], None, [0, 1]),
         "cu_seqlens: expected shape (N + 1,) beside ends [T], got (2,) beside ends (1, 1)"),
        ((1,), "ends: expected 1 or 2 dimensions [T] or [B, T], got shape ()"),
    ],
    ids=str,
)  # fmt: skip
def test_ends_that_are_wrong_are_named(arguments, message):
    with pytest.raises(ValueError, match="expected") as caught:
        check_tree(*arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize("array", [np.asarray, torch.tensor, jnp.asarray])
def test_tensors_of_every_library_are_checked(array):
    check_tree(array([3, 2, 3]), array([0, 1, 1]), array([0, 3]))
    with pytest.raises(TypeError, match="ends: expected integers, got float"):
        check_tree(array([3.0]))
    with pytest.raises(ValueError, match=r"ends\[1\]"):
        check_tree(array([3, 0, 3]))


@pytest.mark.parametrize("side", [torch_attn, pallas_attn])
@pytest.mark.parametrize("public", [Tree, tree_of, check_tree])
def test_the_examples_run_on_both_sides(side, public):
    assert getattr(side, public.__name__) is public
    _, example = inspect.getdoc(public).split("Example::\n")
    exec(textwrap.dedent(example).replace("torch_attn", side.__name__), {})
