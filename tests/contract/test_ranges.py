"""Helpers of ranges, and ranges in the reference, against their definitions query by query."""

from dataclasses import replace
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.contract.test_tree_reference import CASE as TREE
from tests.contract.test_tree_reference import seen as seen_in_tree
from twin_attention.contract.cost import range_pairs
from twin_attention.contract.operands import FlashOperands, VarlenOperands
from twin_attention.contract.ranges import (
    block_diffusion_ranges,
    check_ranges,
    prefix_ranges,
    span_ranges,
)
from twin_attention.contract.reference.attention import attention_forward
from twin_attention.contract.reference.packed import varlen_forward
from twin_attention.interop.parity.cases import FlashCase, VarlenCase
from twin_attention.interop.parity.inputs import make_inputs

FRAMEWORKS = pytest.mark.parametrize("array", [np.array, torch.tensor, jnp.array])


def keys_of(ranges) -> list[set[int]]:
    return [{j for begin, end in own for j in range(begin, end)} for own in np.asarray(ranges)]


@FRAMEWORKS
def test_prefixes(array):
    found = prefix_ranges(array([3, 0]), 5)
    assert type(found) is type(array([0]))
    assert found.shape == (2, 5, 1, 2)
    assert str(found.dtype).endswith("int32")
    assert [keys_of(x) for x in found] == [[{0, 1, 2}] * 5, [set()] * 5]
    packed = prefix_ranges(array([3, 1]), 7, array([0, 4, 6]))
    assert keys_of(packed)[:6] == [{0, 1, 2}] * 4 + [{0}] * 2


@FRAMEWORKS
def test_spans(array):
    starts, ends = array([[1, 5], [0, 0]]), array([[3, 9], [2, 0]])
    found = span_ranges(starts, ends, 6)
    spans = [set(), {1, 2}, {1, 2}, set(), set(), {5, 6, 7, 8}], [{0, 1}] * 2 + [set()] * 4
    assert [keys_of(x) for x in found] == [*map(list, spans)]
    later = span_ranges(starts, ends, 4, first=array([4, 1]))
    assert keys_of(later[0]) == [set(), {5, 6, 7, 8}, {5, 6, 7, 8}, {5, 6, 7, 8}]
    packed = span_ranges(starts, ends, 8, array([0, 4, 7]), array([4, 1]))
    assert keys_of(packed)[:7] == [*keys_of(later[0]), {0, 1}, set(), set()]
    assert not any(keys_of(span_ranges(starts[:, :0], ends[:, :0], 6)[0]))
    # An empty range lies at its query, so that ranges of neighbours have tight bounds.
    assert np.asarray(found)[0, :, 0, 0].tolist() == [0, 1, 1, 3, 4, 5]


def test_block_diffusion():
    found = keys_of(block_diffusion_ranges(4, 10))
    for i in range(20):
        block = i % 10 // 4
        noisy = {j for j in range(10) if j // 4 == block} if i < 10 else set()
        clean = {10 + j for j in range(10) if j // 4 < block + (i >= 10)}
        assert found[i] == noisy | clean
    packed = block_diffusion_ranges(4, [10, 0, 3])
    assert packed[:20].tolist() == block_diffusion_ranges(4, 10).tolist()
    assert packed[20:].tolist() == block_diffusion_ranges(4, 3).tolist()
    with pytest.raises(ValueError, match=r"^block: expected an integer from 1 to"):
        block_diffusion_ranges(0, 10)


def test_what_helpers_make_is_right():
    check_ranges(prefix_ranges([3, 5], 5), [5, 5])
    check_ranges(span_ranges(torch.tensor([[1]]), torch.tensor([[3]]), 5), 5)
    check_ranges(block_diffusion_ranges(4, [10, 3]), [20, 6], [0, 20, 26])
    check_ranges(jnp.zeros((7, 2, 2), jnp.int32), [3, 4], [0, 3, 7])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([[[0.0, 1.0]]], 3), TypeError, "q_ranges: expected integers, got float64"),
        (([[[0, 1]]], 3), ValueError, "q_ranges: expected shape [B, Sq, R, 2], R at most 2, got "
         "(1, 1, 2)"),
        ((np.zeros((1, 1, 3, 2), int), 3), ValueError, "q_ranges: expected shape [B, Sq, R, 2], R "
         "at most 2, got (1, 1, 3, 2)"),
        (([[[[0, 1]]]], [3, 3]), ValueError, "keys: expected one number, or shape (1,), got (2,)"),
        (([[[[0, 1], [0, 4]]]], 3), ValueError,
         "q_ranges[0, 0, 1]: expected a range of keys 0 to 3, got 0 to 4"),
        (([[[[2, 1]]]], 3), ValueError,
         "q_ranges[0, 0, 0]: expected a range of keys 0 to 3, got 2 to 1"),
        (([[[0, 2]], [[0, 2]]], [2, 1], [0, 1, 2]), ValueError,
         "q_ranges[1, 0]: expected a range of keys 0 to 1, got 0 to 2"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(arguments, error, message):
    with pytest.raises(error) as raised:
        check_ranges(*arguments)
    assert str(raised.value) == message


CASES = [
    FlashCase("none", batch=2, seq_q=9, seq_kv=13, head_dim=16, dtype="float64", ranges="any"),
    FlashCase("causal", batch=1, seq_q=9, seq_kv=9, head_dim=16, causal=True, ranges="prefix"),
    FlashCase("window", seq_q=20, seq_kv=17, head_dim=16, window_size=(3, 1), ranges="any"),
    replace(TREE, name="tree", ranges="both"),
]  # fmt: skip


def visible(case: FlashCase, x, b: int) -> torch.Tensor:
    """Return the mask [Sq, Skv], from the definition."""
    right = 0 if case.causal else None if case.window_size is None else case.window_size[1]
    left = None if case.window_size is None else case.window_size[0]
    found = torch.zeros(case.seq_q, case.seq_kv, dtype=torch.bool)
    no_segments = replace(case, segments="")
    in_tree = seen_in_tree(no_segments, x, b) if case.tree else None
    for i in range(case.seq_q):
        p = i + case.seq_kv - case.seq_q
        ranges = x["q_ranges"][b, i].tolist()
        for j in range(case.seq_kv):
            is_seen = (left is None or p - j <= left) and (right is None or j - p <= right)
            if in_tree is not None:
                is_seen = bool(in_tree[i, j])
            is_seen |= any(begin <= j < end for begin, end in ranges)
            if case.segments:
                is_seen &= int(x["q_segment_ids"][b, i]) == int(x["kv_segment_ids"][b, j]) >= 0
            found[i, j] = is_seen
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reference_is_the_definition(case):
    x = make_inputs(replace(case, dtype="float32"), "cpu")
    double = {n: v.double() if v.is_floating_point() else v for n, v in x.items()}
    operands = FlashOperands(**{n: double.get(n) for n in FlashOperands._fields})
    out, _ = attention_forward(operands, case.spec, torch.float64)
    for b in range(case.batch):
        mask = visible(case, x, b)
        q, k, v = (double[n][b].nan_to_num(0) for n in ("q", "k", "v"))
        s = torch.einsum("ihd,jhd->hij", q, k) * case.spec.scale
        s = s.masked_fill(~mask, -torch.inf)
        sink = double["sinks"] if case.sinks else torch.full((case.heads_q,), -torch.inf)
        s = torch.cat([s, sink.double()[:, None, None].expand(-1, case.seq_q, 1)], 2)
        p = s.softmax(2).nan_to_num(0)[..., :-1]
        torch.testing.assert_close(out[b], torch.einsum("hij,jhd->ihd", p, v))
        if not case.tree and not case.segments:
            one = replace(case, batch=1).spec
            pairs = range_pairs(one, x["q_ranges"][b : b + 1].numpy())
            assert pairs == case.heads_q * int(mask.sum())


def test_packed_ranges_are_each_alone():
    lengths = ((9, 14), (0, 3), (11, 11), (5, 2))
    case = VarlenCase("packed", lengths, head_dim=16, ranges="any", window_size=(3, None))
    x = make_inputs(replace(case, dtype="float32"), "cpu")
    operands = VarlenOperands(**{n: x.get(n) for n in VarlenOperands._fields})
    out, lse = varlen_forward(operands, case.spec, torch.float64)
    bounds = zip(pairwise(x["cu_seqlens_q"]), pairwise(x["cu_seqlens_kv"]), strict=True)
    for (begin, end), (first, last) in bounds:
        own = FlashOperands(
            x["q"][None, begin:end], x["k"][None, first:last], x["v"][None, first:last],
            q_ranges=x["q_ranges"][None, begin:end],
        )  # fmt: skip
        spec = case.spec.sequence(int(end - begin), int(last - first))
        want, want_lse = attention_forward(own, spec, torch.float64)
        torch.testing.assert_close(out[begin:end], want[0])
        torch.testing.assert_close(lse[:, begin:end], want_lse[0])
