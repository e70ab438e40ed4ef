"""Terms of scores in the torch operators: every way in which PyTorch may call them."""

from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from torch.func import grad, vmap
from torch.library import opcheck

from interop.parity.cases import FlashCase
from torch_attn import explain, flash_attention
from torch_attn.flash_ops import DENSE, PACKED
from torch_attn.kernels.library.terms import Bias, Terms, terms_argument
from twin_attention.contract.operands import FlashOperands, VarlenOperands

OPTIONS = (None, None, 0, None, True, "ieee", False, 0.0)


@pytest.fixture
def operands(torch_device):
    """q, k, v, a table of distances and slopes."""
    torch.manual_seed(0)
    shapes = (2, 9, 2, 16), (2, 11, 2, 16), (2, 11, 2, 24), (2, 7)
    tensors = [torch.randn(shape, device=torch_device) for shape in shapes]
    return *tensors, torch.rand(2, device=torch_device)


def attend(q, k, v, table, slopes, **options):
    terms = {"relative_bias": table, "alibi_slopes": slopes}
    return flash_attention(q, k, v, causal=True, **terms, **options)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_opcheck(operands, implementation):
    q, k, v, table, slopes = operands
    terms = {"relative_bias": table.requires_grad_(), "alibi_slopes": slopes}
    given = FlashOperands(*(x.requires_grad_() for x in (q, k, v)), **terms)
    forward = DENSE.forwards[True, False].op
    opcheck(forward, (*given, *OPTIONS, implementation))
    detached = FlashOperands(*(None if x is None else x.detach() for x in given))
    results = forward(*detached, *OPTIONS, implementation)
    gradients = results[0], torch.ones_like(results[1])
    frozen = "relative_bias"
    opcheck(DENSE.bwd, (*gradients, *detached, *results, frozen, *OPTIONS, implementation))
    with pytest.raises(ValueError, match=r"operator: expected .*flash_terms_fwd, got .*flash_fwd"):
        DENSE.fwd(*detached, *OPTIONS, implementation)


def test_opcheck_of_packed_sequences(operands):
    q, k, v = (x[0].requires_grad_() for x in operands[:3])
    offsets = (torch.tensor(x, dtype=torch.int32, device=q.device) for x in ([0, 9], [0, 11]))
    terms = {"relative_bias": operands[3], "alibi_slopes": operands[4][None].contiguous()}
    forward = PACKED.forwards[True, False].op
    opcheck(forward, (*VarlenOperands(q, k, v, *offsets, **terms), *OPTIONS, "triton"))


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("own_slopes", [False, True])
def test_vmap(operands, implementation, own_slopes):
    """The table is mapped, or the queries with a table that all share."""
    q, k, v, table, slopes = operands
    slopes = torch.stack([slopes, 2 * slopes]) if own_slopes else slopes
    both = torch.stack([q, 2 * q]), torch.stack([table, -table])

    def loss(q, table):
        return attend(q, k, v, table, slopes, implementation=implementation).square().sum()

    for dims in ((0, 0), (None, 0) if own_slopes else (0, None)):
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


def test_vmap_of_slopes_of_each_sequence_joins_the_batch(operands):
    q, k, v, _, slopes = operands
    several = torch.stack([torch.stack([slopes, 2 * slopes]), torch.stack([slopes, 0 * slopes])])
    got = vmap(lambda slopes: attend(q, k, v, None, slopes))(several)
    want = torch.stack([attend(q, k, v, None, x) for x in several])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_slopes_have_no_gradient(operands, implementation):
    q, k, v, table, slopes = (x.requires_grad_() for x in operands)
    attend(q, k, v, table, slopes, implementation=implementation).sum().backward()
    assert slopes.grad is None
    assert table.grad.shape == table.shape


def test_compile(operands):
    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    args = [x.requires_grad_() for x in operands[:4]]
    got, want = compiled(*args, operands[4]), attend(*args, operands[4])
    torch.testing.assert_close(got, want)
    gradients = [torch.autograd.grad(x.sum(), args) for x in (got, want)]
    torch.testing.assert_close(*gradients)


def test_a_table_in_16_bits_has_its_gradient_in_them(operands):
    q, k, v, table, _ = (x.bfloat16().requires_grad_() for x in operands)
    for by in ("reference", "triton"):
        out = attend(q, k, v, table, None, implementation=by)
        (found,) = torch.autograd.grad(out.sum(), table)
        assert found.dtype == torch.bfloat16


def test_explicit_kernels_say_why_they_pass(operands):
    said = explain(flash_attention, *operands[:3], relative_bias=operands[3])
    assert said.implementation in ("reference", "triton")


def test_all_terms_at_once_have_a_constant_beside_those_of_inner_tuples():
    # Triton 3.6 loses the constants of the bias, such as its alignment, where Terms has none.
    case = FlashCase("", 2, 8, 8, 2, 2, 32, relative=3, bias="bhqk", dropout_rate=0.5)
    bias = Bias(SimpleNamespace(shape=(2, 2, 8, 8), strides=(128, 64, 8, 1)))
    terms = Terms(*(SimpleNamespace(shape=shape) for shape in ((2, 7), (2,), (2,))), bias)
    call = SimpleNamespace(layouts=(terms, None), spec=case.spec)
    found = terms_argument(call)["terms"]
    assert found.bias.align.value == 8
    assert any(x is None or isinstance(x, tl.constexpr) for x in found)
