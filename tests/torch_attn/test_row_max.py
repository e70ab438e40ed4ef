"""Row maxima in the torch operators: every way in which PyTorch may call them."""

import pytest
import torch
from torch.func import grad, vmap
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import torch_attn.flops
from torch_attn import flash_attention, flash_attention_varlen
from torch_attn.flash_ops import DENSE, PACKED
from twin_attention.contract.operands import FlashOperands, VarlenOperands

OPTIONS = (None, 3, 0, None, True, "ieee", True, 0.0)


@pytest.fixture
def qkv(torch_device):
    torch.manual_seed(0)
    shapes = (2, 9, 2, 16), (2, 11, 2, 16), (2, 11, 2, 24)
    return [torch.randn(shape, device=torch_device) for shape in shapes]


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_opcheck(qkv, implementation):
    given = FlashOperands(*(x.requires_grad_() for x in qkv))
    opcheck(DENSE.forwards[False, True].op, (*given, *OPTIONS, implementation))


def test_opcheck_of_packed_sequences(qkv):
    q, k, v = (x[0].requires_grad_() for x in qkv)
    offsets = (torch.tensor(x, dtype=torch.int32, device=q.device) for x in ([0, 9], [0, 11]))
    forward = PACKED.forwards[False, True].op
    opcheck(forward, (*VarlenOperands(q, k, v, *offsets), *OPTIONS, "triton"))


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_it_has_no_gradient(qkv, implementation, return_lse):
    q, k, v = (x.requires_grad_() for x in qkv)
    options = {"causal": True, "implementation": implementation, "return_lse": return_lse}
    out, *lse, row_max = flash_attention(q, k, v, return_row_max=True, **options)
    assert not row_max.requires_grad
    got = torch.autograd.grad([x.sum() for x in (out, *lse)], (q, k, v))
    results = flash_attention(q, k, v, **options)
    results = results if return_lse else [results]
    want = torch.autograd.grad([x.sum() for x in results], (q, k, v))
    torch.testing.assert_close(got, want)


def test_vmap(qkv):
    q, k, v = qkv
    qs, sinks = torch.stack([q, 2 * q]), torch.randn(2, device=q.device)
    for options in ({}, {"sinks": sinks}):

        def attend(q, options=options):
            return flash_attention(q, k, v, return_row_max=True, **options)

        got = vmap(attend)(qs)
        want = [torch.stack(x) for x in zip(*map(attend, qs), strict=True)]
        torch.testing.assert_close(got, tuple(want), rtol=1e-5, atol=1e-5)
        of_q = vmap(grad(lambda q: attend(q)[0].sum()))(qs)
        assert of_q.isfinite().all()


def test_compile(qkv):
    torch.compiler.reset()

    def attend(q, k, v):
        return flash_attention(q, k, v, return_lse=True, return_row_max=True)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    q, k, v = (x.requires_grad_() for x in qkv)
    torch.testing.assert_close(compiled(q, k, v), attend(q, k, v))


def test_flops_are_those_of_the_forward(qkv):
    counts = []
    for asked in (False, True):
        with FlopCounterMode(display=False) as counter:
            flash_attention(*qkv, return_row_max=asked)
        counts.append(counter.get_total_flops())
    assert torch_attn.flops
    assert counts[0] == counts[1] > 0


def test_padding_has_no_score(qkv):
    q, k, v = (x.flatten(0, 1) for x in qkv)
    offsets = [torch.tensor(x, dtype=torch.int32, device=q.device) for x in ([0, 5], [0, 7])]
    _, row_max = flash_attention_varlen(q, k, v, *offsets, return_row_max=True)
    assert (row_max[:, 5:] == -torch.inf).all()
    assert row_max[:, :5].isfinite().all()
