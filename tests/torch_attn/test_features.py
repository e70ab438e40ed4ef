from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from torch.func import grad, vmap
from torch.utils.flop_counter import FlopCounterMode

import torch_attn.flops  # noqa: F401 - tells torch what the operators count
from tests.features import CASES, MAPPED, PACKED, SIZES, operands_of
from tests.torch_attn.operators import check_operator
from torch_attn import flash_attention, flash_attention_varlen
from torch_attn.flash_ops import DENSE
from torch_attn.flash_ops import PACKED as PACKED_OPS
from torch_attn.kernels.library.terms import Bias, Terms, terms_argument
from twin_attention.contract.operands import FlashOperands, VarlenOperands
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.inputs import has_gradient

by_both = pytest.mark.parametrize("implementation", ["reference", "triton"])
ROW_MAX = FlashCase("row maxima", **SIZES, causal=True, row_max=True)


def options_of(case):
    left = None if case.window_size is None else case.window_size[0]
    return None, left, 0, None, True, "ieee", case.row_max, case.dropout_rate, False


def attend(case, operands, **options):
    return flash_attention(**operands, **case.options | options)


@pytest.mark.parametrize("name", [*CASES, "row_max"])
def test_opcheck(torch_device, name):
    case = CASES.get(name, ROW_MAX)
    operands, options = operands_of(case, torch_device), options_of(case)
    given = FlashOperands(
        **operands | {x: operands[x].clone().requires_grad_() for x in ("q", "k", "v")}
    )
    has_terms = bool(case.spec.terms) or case.dropout_rate > 0
    forward = DENSE.forwards[has_terms, case.row_max].op
    check_operator(forward, *given, *options)
    if case.row_max:
        return
    detached = FlashOperands(**operands)
    out, lse, *rest = forward(*detached, *options, "reference")
    gradients = out, torch.ones_like(lse)
    saved = out, lse, rest[0] if rest else None
    frozen = "relative_bias" if name == "terms" else ""
    check_operator(DENSE.bwd, *gradients, *detached, *saved, frozen, *options)
    if name == "terms":
        message = r"operator: expected .*flash_terms_fwd, got .*flash_fwd"
        with pytest.raises(ValueError, match=message):
            DENSE.fwd(*detached, *options, "reference")


@pytest.mark.parametrize("name", PACKED)
def test_opcheck_of_packed_sequences(torch_device, name):
    case = PACKED[name]
    given = VarlenOperands(**operands_of(case, torch_device))
    forward = PACKED_OPS.forwards[bool(case.spec.terms), case.row_max].op
    check_operator(forward, *given, *options_of(case))


@by_both
@pytest.mark.parametrize("name", CASES)
def test_vmap(torch_device, name, implementation):
    """Map over q and one more operand, or only over one of them."""
    case, mapped = CASES[name], MAPPED[name]
    operands = operands_of(case, torch_device)
    names = ("q", mapped)

    number = 2 if operands[mapped].is_floating_point() else 1

    def gradients(implementation):
        def loss(*values):
            given = operands | dict(zip(names, values, strict=True))
            return attend(case, given, implementation=implementation).square().sum()

        return grad(loss, tuple(range(number)))

    one_by_one = gradients("reference")
    several = [torch.stack([operands["q"], 2 * operands["q"]])]
    several.append(torch.stack([operands[mapped], operands[mapped].flip(-1)]))
    for dims in ((0, 0), (None, 0) if name == "own slopes" else (0, None)):
        if implementation == "triton" and dims == (0, None):
            continue
        given = [x if dim == 0 else x[0] for x, dim in zip(several, dims, strict=True)]
        each = [
            one_by_one(*(x[i] if dim == 0 else x for x, dim in zip(given, dims, strict=True)))
            for i in (0, 1)
        ]
        want = tuple(torch.stack(x) for x in zip(*each, strict=True))
        got = vmap(gradients(implementation), dims)(*given)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["segments", "tree", "ranges", "terms", "dropout"])
def test_compile_with_other_numbers_is_one_graph(torch_device, name):
    torch.compiler.reset()
    case, operands = CASES[name], operands_of(CASES[name], torch_device)

    def results(**operands):
        return attend(case, operands)

    compiled = torch.compile(results, fullgraph=True, backend="aot_eager", dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for changed in ({}, {x: y.flip(-1) for x, y in operands.items() if x not in "qkv"}):
            given = operands | changed
            floats = [x.requires_grad_() for name, x in given.items() if has_gradient(name, x)]
            out, want = compiled(**given), results(**given)
            torch.testing.assert_close(out, want)
            torch.testing.assert_close(*(torch.autograd.grad(x.sum(), floats) for x in (out, want)))
            operands = {x: y.detach() for x, y in operands.items()}


@pytest.mark.parametrize("name", ["segments", "tree"])
def test_vmap_with_sinks_shares_the_numbers(torch_device, name):
    case, operands = CASES[name], operands_of(CASES[name], torch_device)
    operands["sinks"] = torch.randn(2, device=torch_device)
    qs = torch.stack([operands["q"], 2 * operands["q"]])
    got = vmap(lambda q: attend(case, operands | {"q": q}))(qs)
    want = torch.stack([attend(case, operands | {"q": q}) for q in qs])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    message = "^flash_attention: vmap over segment ids, ends or depths with sinks, relative"
    with pytest.raises(NotImplementedError, match=message):
        vmap(lambda x: attend(case, operands | {MAPPED[name]: x}))(
            torch.stack([operands[MAPPED[name]]] * 2)
        )


@by_both
def test_a_table_has_a_gradient_in_its_dtype(torch_device, implementation):
    case, operands = CASES["terms"], operands_of(CASES["terms"], torch_device)
    for dtype in (torch.float32, torch.bfloat16):
        given = {x: y.to(dtype).clone().requires_grad_() for x, y in operands.items()}
        given["alibi_slopes"] = operands["alibi_slopes"]
        attend(case, given, implementation=implementation).sum().backward()
        table = given["relative_bias"]
        assert (table.grad.shape, table.grad.dtype) == (table.shape, dtype)


def test_a_seed_of_unsigned_numbers(torch_device):
    case, operands = CASES["dropout"], operands_of(CASES["dropout"], torch_device)
    unsigned = operands | {"dropout_seed": operands["dropout_seed"].view(torch.uint32)}
    assert torch.equal(attend(case, operands), attend(case, unsigned))


def test_autocast_leaves_the_ids(torch_device):
    case, operands = CASES["segments"], operands_of(CASES["segments"], torch_device)
    with torch.autocast(torch_device, torch.bfloat16):
        assert attend(case, operands).dtype == torch.bfloat16


@pytest.mark.parametrize("return_lse", [False, True])
@by_both
def test_row_maxima_have_no_gradient(torch_device, implementation, return_lse):
    operands = {x: y.requires_grad_() for x, y in operands_of(ROW_MAX, torch_device).items()}
    options = {"causal": True, "implementation": implementation, "return_lse": return_lse}
    out, *lse, row_max = flash_attention(**operands, return_row_max=True, **options)
    assert not row_max.requires_grad
    results = flash_attention(**operands, **options)
    results = results if return_lse else [results]
    got, want = (
        torch.autograd.grad([y.sum() for y in x], [*operands.values()])
        for x in ((out, *lse), results)
    )
    torch.testing.assert_close(got, want)


def test_row_maxima_compiled_and_under_vmap(torch_device):
    torch.compiler.reset()
    operands = operands_of(ROW_MAX, torch_device)

    def attend(q, sinks=None):
        return flash_attention(
            **operands | {"q": q}, sinks=sinks, return_lse=True, return_row_max=True
        )

    q = operands["q"]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), attend(q))
    qs = torch.stack([q, 2 * q])
    for sinks in (None, torch.randn(2, device=torch_device)):
        got = vmap(lambda q, sinks=sinks: attend(q, sinks))(qs)
        want = tuple(torch.stack(x) for x in zip(*(attend(q, sinks) for q in qs), strict=True))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        of_q = vmap(grad(lambda q, sinks=sinks: attend(q, sinks)[0].sum()))(qs)
        assert of_q.isfinite().all()


def flops_of(**call):
    with FlopCounterMode(display=False) as counter:
        flash_attention(**call)
    return counter.get_total_flops()


def test_flops_of_row_maxima_and_of_a_tree(torch_device):
    operands = operands_of(ROW_MAX, torch_device)
    assert flops_of(**operands) == flops_of(**operands, return_row_max=True) > 0
    operands = operands_of(CASES["tree"], torch_device)
    given = {name: operands[name] for name in ("q", "k", "v", "kv_ends")}
    position, ends = torch.arange(9)[:, None] + 2, operands["kv_ends"].cpu()[:, None]
    seen = (torch.arange(11) <= position) & (position < ends)
    assert flops_of(**given, causal=True) == 2 * (16 + 24) * 2 * int(seen.sum())


def test_padding_has_no_score(torch_device):
    q, k, v = (x.flatten(0, 1) for x in operands_of(ROW_MAX, torch_device).values())
    offsets = [torch.tensor(x, dtype=torch.int32, device=torch_device) for x in ([0, 5], [0, 7])]
    _, row_max = flash_attention_varlen(q, k, v, *offsets, return_row_max=True)
    assert (row_max[:, 5:] == -torch.inf).all()
    assert row_max[:, :5].isfinite().all()


def test_all_terms_at_once_have_a_constant_beside_those_of_inner_tuples():
    # Triton 3.6 loses the constants of the bias, such as its alignment, where Terms has none.
    case = FlashCase("", 2, 8, 8, 2, 2, 32, relative=3, bias="bhqk", dropout_rate=0.5)
    bias = Bias(SimpleNamespace(shape=(2, 2, 8, 8), strides=(128, 64, 8, 1)))
    terms = Terms(*(SimpleNamespace(shape=shape) for shape in ((2, 7), (2,), (2,))), bias)
    call = SimpleNamespace(layouts=(terms, None), spec=case.spec)
    found = terms_argument(call)["terms"]
    assert found.bias.align.value == 8
    assert any(x is None or isinstance(x, tl.constexpr) for x in found)
