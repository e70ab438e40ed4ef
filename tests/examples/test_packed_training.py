import jax
import numpy as np
import torch

from examples import packed_training
from examples.packed_training import TOLERANCE, train_in_both
from examples.support import torch_packed_training
from examples.support.packed_documents import LENGTHS, NO_TARGET, TOKENS, make_documents
from examples.support.toy_model import make_toy


def test_a_token_has_the_next_one_of_its_document_as_target():
    packed = make_documents()
    assert len(packed.tokens) == len(packed.targets) == TOKENS > sum(LENGTHS)
    for begin, length in zip(packed.offsets[:-1], LENGTHS, strict=True):
        document = packed.tokens[begin : begin + length]
        assert packed.targets[begin : begin + length].tolist() == [*document[1:], NO_TARGET]
    assert (packed.targets[sum(LENGTHS) :] == NO_TARGET).all()


def test_packed_documents_train_as_one_by_one(monkeypatch, torch_device):
    """By the reference on a CPU: an interpreter would take half a minute."""
    monkeypatch.setattr(packed_training, "STEPS", 3)
    losses = train_in_both(torch_device)
    first, *others = losses.values()
    assert len(first) == 3
    assert first[0] > first[1] > first[2]
    for values in others:
        np.testing.assert_allclose(values, first, rtol=0, atol=TOLERANCE)


def test_documents_that_saw_each_other_would_have_another_loss(torch_device):
    given = make_toy().weights, make_documents()
    weights, packed = jax.tree.map(lambda x: torch.tensor(x, device=torch_device), given)
    together = packed._replace(offsets=packed.offsets[[0, -1]])
    apart, merged = (torch_packed_training.packed_loss(weights, x) for x in (packed, together))
    assert abs(apart - merged) > 100 * TOLERANCE
