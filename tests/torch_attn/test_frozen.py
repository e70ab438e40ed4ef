from dataclasses import replace

import pytest
import torch
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

from tests.kernels.test_cubin import kernels_of, planned
from torch_attn import flash_attention
from torch_attn.flash_ops import DENSE
from torch_attn.kernels import reference
from twin_attention.contract.operands import FREEZABLE
from twin_attention.contract.spec import AttentionSpec
from twin_attention.interop.kernels.plan import Operation
from twin_attention.targets import family

TERMS = ("bias", "relative_bias")
SPEC = AttentionSpec(2, 304, 2048, 4, 2, 64, 64, "bfloat16", 0.1, terms=TERMS)
FAMILIES = ("triton", "portable"), ("gluon", "sm90")


@pytest.mark.parametrize("by", FAMILIES)
@pytest.mark.parametrize("batch", [1, 2])  # of its own, and shared
@pytest.mark.parametrize("wide_bias", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_is_allocated_or_launched(by, batch, wide_bias, deterministic):
    spec = replace(SPEC, batch=batch, wide_bias=wide_bias, deterministic=deterministic)
    found = {}
    for frozen in ((), FREEZABLE):
        _, plan = planned(by, "sm90", replace(spec, frozen=frozen), "flash_bwd", sinks=True)
        kernels = kernels_of(plan)
        names = {x.code.kernel.__name__ for x in kernels}
        shapes = {getattr(x.operands[i], "shape", None) for x in kernels for i in x.written}
        computed = {x.name for x in plan.steps if isinstance(x, Operation)}
        left_out = [name for name in FREEZABLE if getattr(plan.results, name) is None]
        found[frozen] = names, shapes, computed, left_out
    names, shapes, computed, left_out = found[()]
    assert not left_out
    assert (1, 4, 304, 2048) in shapes
    assert "exp2" in computed  # of the sinks
    left, few, operations, left_out = found[FREEZABLE]
    assert tuple(left_out) == FREEZABLE
    assert left <= names - {"flash_bwd_bias_kernel", "flash_bwd_relative_kernel"}
    assert few < shapes
    assert (1, 4, 304, 2048) not in few
    assert "exp2" not in operations


@pytest.fixture
def seen(monkeypatch):
    original, found = reference.flash_bwd, []

    def spy(*args):
        gradients = original(*args)
        (spec,) = (x for x in args if isinstance(x, AttentionSpec))
        assert all(getattr(gradients, name) is None for name in spec.frozen)
        found.append(spec.frozen)
        return gradients

    monkeypatch.setattr(reference, "flash_bwd", spy)
    monkeypatch.setattr(family, "_function", family._function.__wrapped__)  # without its cache
    return found


def eager(loss, q, others):
    q, others = q.requires_grad_(), [x.requires_grad_(i == 0) for i, x in enumerate(others)]
    return torch.autograd.grad(loss(q, *others), (q, others[0]))


def checkpointed(loss, q, others):
    def recomputed(*args):
        return checkpoint(loss, *args, use_reentrant=False)

    return eager(recomputed, q, others)


def compiled(loss, q, others):
    torch.compiler.reset()
    return eager(torch.compile(loss, fullgraph=True, backend="aot_eager"), q, others)


def transformed(loss, q, others):
    return grad(loss, (0, 1))(q, *others)


def mapped(loss, q, others):
    many = vmap(grad(loss, (0, 1)), (0, None, None, None))(torch.stack([q, q]), *others)
    return tuple(x[0] for x in many)


@pytest.mark.parametrize("way", [eager, checkpointed, compiled, transformed, mapped])
def test_what_needs_no_gradient_is_frozen(torch_device, seen, way):
    q, k, v = torch.randn(3, 2, 9, 2, 16, device=torch_device)
    shapes = {"sinks": (2,), "bias": (1, 2, 9, 9), "relative_bias": (2, 5)}
    values = {name: torch.randn(x, device=torch_device) for name, x in shapes.items()}
    for first in FREEZABLE:
        names = [first, *(x for x in FREEZABLE if x != first)]

        def loss(q, *others, names=names):
            terms = dict(zip(names, others, strict=True))
            return flash_attention(q, k, v, **terms, implementation="reference").square().sum()

        seen.clear()
        got = way(loss, q.clone(), [values[name].clone() for name in names])
        assert set(seen) == {tuple(x for x in FREEZABLE if x != first)}
        every = [x.clone().requires_grad_() for x in (q, *(values[name] for name in names))]
        want = torch.autograd.grad(loss(*every), every)
        assert seen[-1] == ()
        torch.testing.assert_close(got, want[:2], rtol=1e-5, atol=1e-5)


def test_compiled_ahead_of_the_first_backward(monkeypatch):
    specs = []
    monkeypatch.setattr(
        DENSE, "run_backward", lambda function, spec, *_: specs.append(spec), raising=True
    )
    operands = [torch.randn(2, 9, 2, 16, dtype=torch.bfloat16).requires_grad_() for _ in "qkv"]
    bias = torch.randn(1, 2, 9, 9)
    given = DENSE.operands(*operands, bias=bias)
    call = DENSE.call_of(
        given, (None, None, None, None, None, "ieee", False, 0.0, False, "reference")
    )
    DENSE._launches_of_backward(call, given)
    assert specs[0].frozen == ("bias",)
