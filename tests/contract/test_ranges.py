import jax.numpy as jnp
import numpy as np
import pytest
import torch

from twin_attention.contract.ranges import (
    block_diffusion_ranges,
    check_ranges,
    prefix_ranges,
    span_ranges,
)

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
