"""Dropout and bias in the torch operators: every way in which PyTorch may call them."""

import pytest
import torch
from torch.func import grad, vmap
from torch.library import opcheck

from torch_attn import flash_attention
from torch_attn.flash_ops import DENSE
from twin_attention.contract.operands import FlashOperands

OPTIONS = (None, None, 0, None, True, "ieee", False, 0.3)


@pytest.fixture
def operands(torch_device):
    """q, k, v, a bias and a seed."""
    torch.manual_seed(0)
    shapes = (2, 9, 2, 16), (2, 11, 2, 16), (2, 11, 2, 24), (1, 2, 9, 11)
    tensors = [torch.randn(shape, device=torch_device) for shape in shapes]
    return *tensors, torch.tensor([1, -2], dtype=torch.int32, device=torch_device)


def attend(q, k, v, bias, seed, **options):
    terms = {"bias": bias, "dropout_seed": seed, "dropout_rate": 0.3}
    return flash_attention(q, k, v, causal=True, **terms, **options)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_opcheck(operands, implementation):
    *tensors, seed = operands
    q, k, v, bias = (x.requires_grad_() for x in tensors)
    given = FlashOperands(q, k, v, bias=bias, dropout_seed=seed)
    forward = DENSE.forwards[True, False].op
    opcheck(forward, (*given, *OPTIONS, implementation))
    detached = FlashOperands(*(None if x is None else x.detach() for x in given))
    results = forward(*detached, *OPTIONS, implementation)
    gradients = results[0], torch.ones_like(results[1])
    opcheck(DENSE.bwd, (*gradients, *detached, *results, "", *OPTIONS, implementation))


def test_vmap_drops_the_same_in_each_element(operands):
    """The bias is mapped, or shared, and has a gradient in each element."""
    q, k, v, bias, seed = operands
    both = torch.stack([q, 2 * q]), torch.stack([bias, -bias])

    def loss(q, bias):
        return attend(q, k, v, bias, seed).square().sum()

    for dims in ((0, 0), (0, None)):
        args = [x if dim == 0 else x[0] for x, dim in zip(both, dims, strict=True)]
        got = vmap(grad(loss, (0, 1)), dims)(*args)
        each = [
            grad(loss, (0, 1))(
                *(x[i] if dim == 0 else x for x, dim in zip(args, dims, strict=True))
            )
            for i in range(2)
        ]
        want = tuple(torch.stack(x) for x in zip(*each, strict=True))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_compile_for_any_seed(operands):
    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    q, k, v, bias, seed = operands
    args = [x.requires_grad_() for x in (q, k, v, bias)]
    for own in (seed, seed + 1):
        got, want = compiled(*args, own), attend(*args, own)
        torch.testing.assert_close(got, want)
        gradients = [torch.autograd.grad(x.sum(), args) for x in (got, want)]
        torch.testing.assert_close(*gradients)


def test_a_seed_of_unsigned_numbers(operands):
    *tensors, seed = operands
    assert torch.equal(attend(*tensors, seed), attend(*tensors, seed.view(torch.uint32)))
