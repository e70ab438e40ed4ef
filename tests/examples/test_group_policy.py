import numpy as np

from examples.group_policy import TOLERANCE, are_equal, update_in_both


def test_a_tree_trains_as_separate_sequences(torch_device):
    """By the reference on a CPU: an interpreter would take half a minute."""
    updates = update_in_both(torch_device)
    assert set(updates) == {f"{x} {y}" for x in ("torch", "jax") for y in ("tree", "separate")}
    for update in updates.values():
        assert update.losses[-1] < update.losses[1] < update.losses[0] + TOLERANCE
        assert all(np.abs(x).max() > 100 * TOLERANCE for x in update.gradients[0].values())
    assert are_equal(updates)
