import pytest
import torch

from twin_attention.contract.operands import FlashOperands
from twin_attention.contract.reference.dilated import dilated_backward, dilated_forward
from twin_attention.contract.spec import DilatedSpec, Dilation, FlashOptions, dilated_calls


def dilated_by_keys(q, k, v, spec):
    """A query sees the keys of all pairs, one of several pairs several times."""
    batch, tokens, heads, _ = q.shape
    outs = q.new_zeros(batch, tokens, heads, v.shape[3])
    lses = q.new_full((batch, heads, tokens), -torch.inf)
    for b in range(batch):
        for h in range(heads):
            head = h // spec.group_size
            for i in range(tokens):
                keys = [
                    j
                    for length, rate in spec.dilations
                    for j in range(i // length * length, i // length * length + length)
                    if i % rate == j % rate == head % rate and (spec.window.right is None or j <= i)
                ]
                if keys:
                    s = spec.scale * k[b, keys, head] @ q[b, i, h]
                    lses[b, h, i] = torch.logsumexp(s, dim=0)
                    outs[b, i, h] = torch.softmax(s, dim=0) @ v[b, keys, head]
    return outs, lses


@pytest.mark.parametrize("causal", [False, True])
def test_forward_and_gradients(causal):
    torch.manual_seed(0)
    shapes = (2, 12, 6, 16), (2, 12, 3, 16), (2, 12, 3, 24)
    q, k, v = (torch.randn(x, dtype=torch.float64, requires_grad=True) for x in shapes)
    pairs = tuple(map(Dilation, (6, 4, 12), (1, 2, 4)))
    options = FlashOptions(0.3, None, 0 if causal else None)
    spec = DilatedSpec.of(FlashOperands(q, k, v), "float32", options, dilations=pairs)
    want = dilated_by_keys(q, k, v, spec)
    gradients = tuple(map(torch.randn_like, want))
    detached = FlashOperands(*(x.detach() for x in (q, k, v)))
    got = dilated_forward(detached, spec, torch.float64)
    got = *got, *dilated_backward(*gradients, detached, spec, torch.float64)[:3]
    want = *want, *torch.autograd.grad(want, (q, k, v), gradients)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_pairs_of_one_length_are_one_call():
    pairs = tuple(map(Dilation, (64, 32, 16, 64), (4, 2, 1, 1)))
    one, other = dilated_calls(pairs)
    assert [x.rate for x in one] == [1, 2, 4]
    assert other == (Dilation(64, 1),)
    assert dilated_calls(pairs[::-1]) == (one, other)
