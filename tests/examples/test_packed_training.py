import numpy as np

from examples import packed_training
from examples.packed_training import TOLERANCE, train_in_both


def test_packed_documents_train_as_one_by_one(monkeypatch, torch_device):
    """By the reference on a CPU: an interpreter would take half a minute."""
    monkeypatch.setattr(packed_training, "STEPS", 3)
    losses = train_in_both(torch_device)
    first, *others = losses.values()
    assert len(first) == 3
    assert first[0] > first[1] > first[2]
    for values in others:
        np.testing.assert_allclose(values, first, rtol=0, atol=TOLERANCE)
