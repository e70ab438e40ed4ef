"""`torch.vmap` over an axis of size 0 returns results of size 0."""

import pytest
import torch

from torch_attn import block_sparse_attention, dilated_attention, flash_attention, merge_states

X, BIAS = torch.zeros(0, 1, 8, 2, 16), torch.zeros(1, 1, 8, 8)
MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)
CALLS = {
    "plain": lambda x: flash_attention(x, x, x),
    "sinks": lambda x: flash_attention(x, x, x, sinks=x[0, 0, :, 0].contiguous()),
    "bias": lambda x: flash_attention(x, x, x, bias=BIAS),
    "mask": lambda x: block_sparse_attention(x, x, x, MASK),
    "dilated": lambda x: dilated_attention(x, x, x, [4, 8], [1, 2]),
    "merge": lambda x: merge_states(x[None], x.sum(-1).mT[None])[0],
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_results_and_gradients_of_no_element(call):
    assert torch.vmap(call)(X).shape == X.shape
    assert torch.vmap(torch.func.grad(lambda x: call(x).sum()))(X).shape == X.shape
