import numpy as np
import pytest
import torch

from examples import torch_context_training
from examples.torch_context_training import (
    TOLERANCE,
    run_rank,
    train_on_a_rank,
    train_on_one_device,
)
from twin_attention.interop.parity.ranks import run_ranks


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(torch_context_training, "STEPS", 2)

    def on_rank(peers):
        def sum_over_ranks(x):
            x.copy_(torch.stack(peers.room.show(peers.rank, x.clone())).sum(0))

        return train_on_a_rank(peers.rank, 4, peers, sum_over_ranks)

    return lambda: run_ranks(4, on_rank)


def test_ranks_have_the_losses_of_one_device(ranks, tmp_path):
    alone = train_on_one_device()
    assert alone[0] > alone[1]
    for losses in (*ranks(), run_rank(0, 1, str(tmp_path / "store"))):
        np.testing.assert_allclose(losses, alone, rtol=0, atol=TOLERANCE)
