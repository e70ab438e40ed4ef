import jax
import numpy as np
import pytest
import torch

from examples.group_policy import CLIP, TOLERANCE, are_equal, update_in_both
from examples.support import torch_group_policy
from examples.support.continuations import CONTINUATIONS, PROMPT, make_batches
from examples.support.toy_model import make_toy


def test_the_batches_are_the_same_continuations():
    tree, separate = make_batches()
    assert len(separate.offsets) == CONTINUATIONS + 1
    assert len(separate.tokens) == len(tree.tokens) + (CONTINUATIONS - 1) * PROMPT
    assert tree.shares.sum() == pytest.approx(1, abs=1e-5)
    assert (tree.shares * tree.advantages).sum() == pytest.approx(0, abs=1e-5)
    is_prompt = separate.shares == 0
    for name in ("tokens", "positions", "advantages", "shares"):
        own = getattr(separate, name)
        assert np.array_equal(own[~is_prompt], getattr(tree, name)[PROMPT:])
    is_first = np.flatnonzero(~is_prompt & np.roll(is_prompt, 1))
    assert len(is_first) == CONTINUATIONS
    assert (separate.parents[is_first] == is_first - 1).all()
    assert (tree.parents[PROMPT:] == PROMPT - 1).sum() == CONTINUATIONS


def test_a_tree_trains_as_separate_sequences(torch_device):
    """By the reference on a CPU: an interpreter would take half a minute."""
    updates = update_in_both(torch_device)
    assert set(updates) == {f"{x} {y}" for x in ("torch", "jax") for y in ("tree", "separate")}
    for update in updates.values():
        assert update.losses[-1] < update.losses[1] < update.losses[0] + TOLERANCE
        assert all(np.abs(x).max() > 100 * TOLERANCE for x in update.gradients[0].values())
    assert are_equal(updates)


def test_continuations_that_saw_each_other_would_have_another_loss(torch_device):
    given = make_toy().weights, make_batches()[0]
    weights, tree = jax.tree.map(lambda x: torch.tensor(x, device=torch_device), given)
    together = tree._replace(ends=torch.full_like(tree.ends, len(tree.ends)))
    old = torch.full_like(tree.shares, -4.0)
    apart, merged = (
        torch_group_policy.policy_loss(weights, x, old, CLIP, None) for x in (tree, together)
    )
    assert abs(apart - merged) > 100 * TOLERANCE
