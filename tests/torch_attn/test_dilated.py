import pytest
import torch
from torch.func import grad, vmap

from torch_attn import dilated_attention

# Several, two of which one copies nothing, and one pair.
PAIRS = [((8, 16, 32), (1, 2, 4)), ((16, 32), (1, 4)), ((16,), (1,)), ((32,), (4,))]
every_pair = pytest.mark.parametrize("pairs", PAIRS, ids=str)


@pytest.fixture
def operands(torch_device):
    torch.manual_seed(0)
    shapes = (2, 32, 6, 16), (2, 32, 3, 16), (2, 32, 3, 24)
    return [torch.randn(shape, device=torch_device, requires_grad=True) for shape in shapes]


def loss(q, k, v, pairs):
    out, lse = dilated_attention(q, k, v, *pairs, causal=True, return_lse=True)
    return out.square().sum() + lse.clamp(-9).sum()


@pytest.mark.parametrize("pairs", PAIRS[1::2], ids=str)
def test_compile(operands, pairs):
    """With other pairs too, whose numbers torch might take as variables."""
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*operands, pairs), operands)
    want = torch.autograd.grad(loss(*operands, pairs), operands)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@every_pair
def test_vmap_of_grad(operands, pairs):
    q, k, v = (x.detach() for x in operands)
    qs = torch.stack([q, 2 * q])
    got = vmap(lambda q: grad(loss)(q, k, v, pairs))(qs)
    want = torch.stack([grad(loss)(q, k, v, pairs) for q in qs])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_views_of_a_packed_projection(operands):
    packed = torch.cat([*operands[:2], operands[1]], 2)
    views = packed.split((6, 3, 3), 2)
    for pairs in PAIRS:
        got = dilated_attention(*views, *pairs)
        want = dilated_attention(*(x.contiguous() for x in views), *pairs)
        assert torch.equal(got, want)
