import numpy as np

from examples.mean_flow import TOLERANCE, train_in_both


def test_both_frameworks_have_the_same_losses(torch_device):
    losses = train_in_both(torch_device)
    assert sorted(losses["jax"], reverse=True) == losses["jax"]
    np.testing.assert_allclose(losses["torch"], losses["jax"], rtol=0, atol=TOLERANCE)
