"""Trees in the torch operators: every way in which PyTorch may call them."""

import pytest
import torch
from torch.func import grad, vmap
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import torch_attn
import torch_attn.flops
from torch_attn import explain, flash_attention
from torch_attn.flash_ops import DENSE, PACKED
from twin_attention.contract.operands import FlashOperands, VarlenOperands

OPTIONS = (None, 3, 0, None, True, "ieee", False, 0.0)
TREE = ("kv_ends", "q_depths", "kv_depths")


@pytest.fixture
def operands(torch_device):
    """q, k, v, ends of keys, and depths of queries and of keys."""
    torch.manual_seed(0)
    shapes = (1, 9, 2, 16), (1, 11, 2, 16), (1, 11, 2, 24)
    q, k, v = (torch.randn(shape, device=torch_device) for shape in shapes)
    ends = [11, 11, 11, 7, 6, 7, 7, 11, 9, 11, 11]
    depths = [0, 1, 2, 3, 4, 4, 5, 3, 4, 4, 5]
    tree = (torch.tensor([x], dtype=torch.int32) for x in (ends, depths[2:], depths))
    return q, k, v, *(x.to(torch_device) for x in tree)


def attend(q, k, v, *tree, **options):
    names = dict(zip(TREE, tree, strict=True))
    return flash_attention(q, k, v, causal=True, window_size=(3, None), **names, **options)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_opcheck(operands, implementation):
    *qkv, ends, q_depths, kv_depths = operands
    tree = {"kv_ends": ends, "q_depths": q_depths, "kv_depths": kv_depths}
    given = FlashOperands(*(x.requires_grad_() for x in qkv), **tree)
    opcheck(DENSE.fwd, (*given, *OPTIONS, implementation))
    detached = FlashOperands(*(x.detach() for x in qkv), **tree)
    out, lse = DENSE.fwd(*detached, *OPTIONS, implementation)
    gradients = out, torch.ones_like(lse)
    opcheck(DENSE.bwd, (*gradients, *detached, out, lse, None, "", *OPTIONS, implementation))


def test_opcheck_of_packed_sequences(operands):
    q, k, v, *tree = (x[0] for x in operands)
    offsets = (torch.tensor(x, dtype=torch.int32, device=q.device) for x in ([0, 9], [0, 11]))
    given = VarlenOperands(q, k, v, *offsets, **dict(zip(TREE, tree, strict=True)))
    opcheck(PACKED.fwd, (*given, *OPTIONS, "triton"))
    out, _ = PACKED.fwd(*given, *OPTIONS, "triton")
    torch.testing.assert_close(out, attend(*operands)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_vmap(operands, implementation):
    """Ends are mapped, depths shared by all."""
    q, k, v, ends, *depths = operands
    qs, several = torch.stack([q, 2 * q]), torch.stack([ends, ends - 1])

    def loss(q, ends):
        return attend(q, k, v, ends, *depths, implementation=implementation).square().sum()

    got = vmap(grad(loss))(qs, several)
    want = torch.stack([grad(loss)(*x) for x in zip(qs, several, strict=True)])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_vmap_with_sinks_shares_the_tree(operands):
    q, k, v, *tree = operands
    qs, sinks = torch.stack([q, 2 * q]), torch.randn(2, device=q.device)
    got = vmap(lambda q: attend(q, k, v, *tree, sinks=sinks))(qs)
    want = torch.stack([attend(q, k, v, *tree, sinks=sinks) for q in qs])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    ends = torch.stack([tree[0]] * 2)
    with pytest.raises(NotImplementedError, match="vmap over segment ids, ends or depths"):
        vmap(lambda ends: attend(q, k, v, ends, *tree[1:], sinks=sinks))(ends)


def test_compile_with_another_tree_is_one_graph(operands):
    torch.compiler.reset()
    q, k, v, *tree = operands
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for others in (tree, [x.flip(1) for x in tree]):
            x = q.detach().requires_grad_()
            out, want = compiled(x, k, v, *others), attend(x, k, v, *others)
            torch.testing.assert_close(out, want)
            (dq,), (want_dq,) = (torch.autograd.grad(y.sum(), x) for y in (out, want))
            torch.testing.assert_close(dq, want_dq)


@pytest.mark.parametrize("target", ["sm80", "sm90"])
def test_explain_says_which_kernels_take_a_tree(operands, monkeypatch, target):
    monkeypatch.setattr("torch_attn.dispatch.target_of", lambda device: target)
    q, k, v, *tree = operands
    half, tree = [x.half() for x in (q, k, v)], dict(zip(TREE, tree, strict=True))
    options = {"causal": True, **tree}
    assert explain(flash_attention, *half, **options).implementation == "gluon"
    options["window_size"] = (3, None)
    found = explain(flash_attention, *half, **options)
    assert found.implementation == ("triton" if target == "sm80" else "gluon")
    reason = "gluon: a window of depths was not timed in its kernels"
    assert (reason in found.passed_over) == (target == "sm80")
    found = explain(flash_attention, *half, **options, implementation="gluon")
    assert found.implementation == "gluon"


def test_floating_point_operations_are_those_of_the_tree(operands):
    q, k, v, ends, *_ = operands
    position = torch.arange(9)[:, None] + 2
    key = torch.arange(11)
    seen = (key <= position) & (position < ends[0].cpu())
    with FlopCounterMode(display=False) as counter:
        torch_attn.flash_attention(q, k, v, causal=True, kv_ends=ends)
    assert counter.get_total_flops() == 2 * (16 + 24) * 2 * int(seen.sum())
