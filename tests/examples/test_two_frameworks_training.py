import numpy as np
import pytest

pytest.importorskip("flax")

from examples import text_model
from examples.two_frameworks_training import train_in_both


def test_both_frameworks_have_the_same_losses(monkeypatch, capsys, torch_device):
    monkeypatch.setattr(text_model, "BATCH", 2)
    losses, tolerance = train_in_both(steps=2)
    (first, second), names = losses.values(), [*losses]
    assert first[0] > first[1]
    np.testing.assert_allclose(first, second, rtol=0, atol=tolerance)
    printed = capsys.readouterr().out
    if torch_device == "cpu":
        assert names == ["torch reference", "jax reference"]
        assert "torch: no gluon: implementation: expected" in printed
        assert "jax: no gluon: implementation: expected" in printed
