import pytest
import torch
from torch.func import grad, vmap

from tests.torch_attn.operators import check_operator
from torch_attn import BlockMask, block_sparse_attention
from torch_attn.flash_ops import SPARSE
from twin_attention.contract.operands import BlockSparseOperands

OPTIONS = (None, None, 0, None, True, "ieee", False, 0.0, False)


@pytest.fixture
def operands(torch_device):
    torch.manual_seed(0)
    shapes = (1, 70, 2, 16), (1, 130, 1, 16), (1, 130, 1, 24)
    kept = torch.tensor([[[1, 0, 1], [0, 1, 0]], [[0, 1, 1], [0, 0, 0]]], device=torch_device)
    return *(torch.randn(shape, device=torch_device) for shape in shapes), kept.bool()


def test_opcheck(operands):
    *qkv, kept = operands
    lists = BlockMask.of(kept)
    given = BlockSparseOperands(*(x.requires_grad_() for x in qkv), *lists)
    check_operator(SPARSE.fwd, *given, *OPTIONS)
    detached = BlockSparseOperands(*(x.detach() for x in qkv), *lists)
    out, lse = SPARSE.fwd(*detached, *OPTIONS, "reference")
    gradients = out, torch.ones_like(lse)
    check_operator(SPARSE.bwd, *gradients, *detached, out, lse, None, "", *OPTIONS)


@pytest.mark.parametrize("mapped", [(0, None), (0, 0), (None, 0)], ids=str)
def test_vmap(operands, mapped):
    q, k, v, kept = operands
    q, k, v = (torch.cat([x, x.flip(1)]) for x in (q, k, v))

    def loss(q, kept):
        return block_sparse_attention(q, k, v, kept, causal=True).square().sum()

    for mask in (kept, torch.stack([kept, ~kept])):
        qs = torch.stack([q, 2 * q]) if mapped[0] == 0 else q
        masks = torch.stack([mask, mask.flip(-1)]) if mapped[1] == 0 else mask
        got = vmap(grad(loss), mapped)(qs, masks)
        both = [
            (qs[i] if mapped[0] == 0 else q, masks[i] if mapped[1] == 0 else mask) for i in (0, 1)
        ]
        want = torch.stack([grad(loss)(*x) for x in both])
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_vmap_with_sinks_is_refused(operands):
    q, k, v, kept = operands
    message = "^block_sparse_attention: vmap with sinks is not supported; "
    sinks = torch.zeros(2, device=q.device)
    with pytest.raises(NotImplementedError, match=message):
        vmap(lambda q: block_sparse_attention(q, k, v, kept, sinks=sinks))(torch.stack([q, q]))


@pytest.mark.parametrize("of_lists", [True, False])
def test_compile(operands, of_lists):
    *qkv, kept = operands
    mask = BlockMask.of(kept) if of_lists else kept
    qkv = [x.requires_grad_() for x in qkv]

    def call(mask, *qkv):
        out, lse = block_sparse_attention(*qkv, mask, causal=True, return_lse=True)
        return out.square().sum() + lse.clamp(-9).sum()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(mask, *qkv), qkv)
    want = torch.autograd.grad(call(mask, *qkv), qkv)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
