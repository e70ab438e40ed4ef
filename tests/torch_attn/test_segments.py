"""Segment ids in the torch operators: every way in which PyTorch may call them."""

import pytest
import torch
from torch.func import grad, vmap
from torch.library import opcheck

from torch_attn import explain, flash_attention
from torch_attn.flash_ops import DENSE
from twin_attention.contract.operands import FlashOperands

OPTIONS = (None, None, 0, None, True, "ieee", False, 0.0)


@pytest.fixture
def operands(torch_device):
    """q, k, v and the ids of queries and of keys."""
    torch.manual_seed(0)
    shapes = (1, 9, 2, 16), (1, 11, 2, 16), (1, 11, 2, 24)
    q, k, v = (torch.randn(shape, device=torch_device) for shape in shapes)
    ids = (torch.randint(-1, 3, x.shape[:2], device=torch_device).int() for x in (q, k))
    return q, k, v, *ids


def attend(q, k, v, q_ids, kv_ids, **options):
    return flash_attention(q, k, v, q_segment_ids=q_ids, kv_segment_ids=kv_ids, **options)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_opcheck(operands, implementation):
    *qkv, q_ids, kv_ids = operands
    qkv = [x.requires_grad_() for x in qkv]
    given = FlashOperands(*qkv, None, q_ids, kv_ids)
    opcheck(DENSE.fwd, (*given, *OPTIONS, implementation))
    detached = FlashOperands(*(x.detach() for x in qkv), None, q_ids, kv_ids)
    out, lse = DENSE.fwd(*detached, *OPTIONS, implementation)
    gradients = out, torch.ones_like(lse)
    opcheck(DENSE.bwd, (*gradients, *detached, out, lse, None, "", *OPTIONS, implementation))


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_vmap(operands, implementation):
    """Ids are mapped, or shared by all."""
    q, k, v, q_ids, kv_ids = operands
    qs, ids = torch.stack([q, 2 * q]), torch.stack([kv_ids, kv_ids.flip(1)])

    def loss(q, kv_ids):
        return attend(q, k, v, q_ids, kv_ids, implementation=implementation).square().sum()

    got = vmap(grad(loss))(qs, ids)
    want = torch.stack([grad(loss)(*x) for x in zip(qs, ids, strict=True)])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_vmap_with_sinks_shares_the_ids(operands):
    q, k, v, *ids = operands
    qs, sinks = torch.stack([q, 2 * q]), torch.randn(2, device=q.device)
    got = vmap(lambda q: attend(q, k, v, *ids, sinks=sinks))(qs)
    want = torch.stack([attend(q, k, v, *ids, sinks=sinks) for q in qs])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    message = "^flash_attention: vmap over segment ids, ends or depths with sinks, relative"
    with pytest.raises(NotImplementedError, match=message):
        vmap(lambda q_ids: attend(q, k, v, q_ids, ids[1], sinks=sinks))(torch.stack([ids[0]] * 2))


def test_compile_with_other_ids_is_one_graph(operands):
    torch.compiler.reset()
    q, k, v, q_ids, kv_ids = operands
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for ids in ((q_ids, kv_ids), (q_ids.flip(1), kv_ids - 1)):
            x = q.detach().requires_grad_()
            out = compiled(x, k, v, *ids)
            want = attend(x, k, v, *ids)
            torch.testing.assert_close(out, want)
            (dq,), (want_dq,) = (torch.autograd.grad(y.sum(), x) for y in (out, want))
            torch.testing.assert_close(dq, want_dq)


def test_autocast_leaves_the_ids(operands):
    with torch.autocast(operands[0].device.type, torch.bfloat16):
        assert attend(*operands).dtype == torch.bfloat16


@pytest.mark.parametrize("target", ["sm80", "sm90"])
def test_explain_says_which_kernels_take_ids(operands, monkeypatch, target):
    monkeypatch.setattr("torch_attn.dispatch.target_of", lambda device: target)
    q, k, v, *ids = operands
    names = ("q_segment_ids", "kv_segment_ids")
    half, ids = [x.half() for x in (q, k, v)], dict(zip(names, ids, strict=True))
    assert explain(flash_attention, *half, **ids).implementation == "gluon"
    assert explain(flash_attention, q, k, v, **ids).implementation == "triton"
