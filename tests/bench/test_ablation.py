"""The forward without its softmax or with barriers around it: its results and its code."""

import re
from importlib import import_module
from itertools import groupby

import jax
import jax.numpy as jnp
import pytest
import torch
import triton

from bench.ablation import pallas_attn as in_pallas
from bench.ablation import torch_attn as in_torch
from bench.ablation.substitute import with_names
from bench.records import ABLATIONS, WITH_BARRIERS, WITHOUT_SOFTMAX
from interop.exchange import to_jax, to_torch
from interop.parity.cases import FlashCase
from interop.parity.inputs import make_inputs
from pallas_attn import lowering
from torch_attn import launch
from tuning.static import triton_aot
from twin_attention.contract.operands import FlashOperands
from twin_attention.targets.family import portable_backend
from twin_attention.targets.target import TARGETS

CASE = FlashCase(
    "ablation", batch=1, seq_q=64, seq_kv=128, heads_q=2, heads_kv=1, head_dim=32, dtype="float16"
)
SHAPE = (1, 256, 4, 128)
SPEC = FlashCase("", 1, 256, 256, 4, 4, 128, dtype="float16").spec
MODULES = {"torch_attn": in_torch, "pallas_attn": in_pallas}
PRODUCT = {"sm80": r"mma\.sync\.aligned", "sm90": r"wgmma\.mma_async"}
SHIPPED = "shipped"


def function(side, build):
    """Return a side's forward as it is shipped, or an ablation of it."""
    if build != SHIPPED:
        return MODULES[side].flash_fwd(build)
    return import_module(f"{side}.kernels.portable.flash_fwd").flash_fwd


def run(side, build):
    """Return a build's output of `CASE` in the interpreter, and the inputs."""
    inputs = make_inputs(CASE, "cpu")
    q, k, v = (inputs[name] for name in "qkv")
    operands = FlashOperands(q, k, v)
    backend = portable_backend(side, None)
    if side == "torch_attn":
        return function(side, build)(operands, CASE.spec, backend)[0], (q, k, v)
    out, _ = function(side, build)(FlashOperands(*map(to_jax, (q, k, v))), CASE.spec, backend)
    return to_torch(out), (q, k, v)


def ptx(side, build, target):
    """Return what a build is compiled to."""
    forward, backend = function(side, build), portable_backend(side, target)
    if side == "torch_attn":
        qkv = (torch.empty(SHAPE, dtype=torch.float16, device="meta") for _ in range(3))
        with triton_aot._driver(target), launch.recording() as compiled:
            forward(FlashOperands(*qkv), SPEC, backend)
    else:
        qkv = [jax.ShapeDtypeStruct(SHAPE, jnp.float16)] * 3
        call = jax.jit(lambda *qkv: forward(FlashOperands(*qkv), SPEC, backend))
        with lowering.recording() as compiled:
            call.trace(*qkv).lower(lowering_platforms=("cuda",))
    ((_, _, kernel),) = compiled
    return kernel.asm["ptx"]


def instructions(code, target):
    """Return the kinds of a kernel's products, exponentials, barriers and waits, in order."""
    kinds = {
        "product": PRODUCT[target],
        "exponential": r"ex2\.approx",
        "barrier": r"bar\.sync",
        "wait": r"cp\.async\.wait_group",  # for what was loaded ahead
    }
    pattern = "|".join(f"(?P<{kind}>{text})" for kind, text in kinds.items())
    return [found.lastgroup for found in re.finditer(pattern, code)]


def fenced(kinds):
    """Count the softmaxes with a barrier on either side."""
    runs = [kind for kind, _ in groupby(kinds)]
    around = ["barrier", "exponential", "barrier"]
    return sum(runs[i : i + 3] == around for i in range(len(runs)))


@pytest.mark.parametrize("side", MODULES)
def test_without_softmax_it_is_the_two_products_alone(side):
    out, (q, k, v) = run(side, WITHOUT_SOFTMAX)
    s = torch.einsum("bqhd,bkd->bhqk", q.double(), k[:, :, 0].double())
    expected = torch.einsum("bhqk,bkd->bqhd", s, v[:, :, 0].double())
    torch.testing.assert_close(out.double(), expected, rtol=0.01, atol=0.5)


@pytest.mark.parametrize("side", MODULES)
def test_with_barriers_it_gives_what_is_shipped(side, monkeypatch):
    """An interpreter has no warps, so that a barrier is nothing there."""
    wait = triton.jit(unchanged) if side == "torch_attn" else unchanged
    monkeypatch.setattr(MODULES[side], "wait_for_block", wait)
    out, _ = run(side, WITH_BARRIERS)
    expected, _ = run(side, SHIPPED)
    assert torch.equal(out, expected)


def unchanged(x):
    return x


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("side", MODULES)
def test_the_code_has_no_exponentials_or_barriers_around_them(side, target):
    builds = (SHIPPED, *ABLATIONS)
    shipped, without, barred = (instructions(ptx(side, build, target), target) for build in builds)
    assert "exponential" in shipped
    assert "exponential" not in without
    assert without.count("product") == shipped.count("product")
    assert without.count("wait") == shipped.count("wait")
    softmaxes = [kind for kind, _ in groupby(shipped)].count("exponential")
    assert (fenced(shipped), fenced(barred)) == (0, softmaxes)
    for kind in ("product", "exponential", "wait"):
        assert barred.count(kind) == shipped.count(kind) > 0
    assert barred.count("barrier") == shipped.count("barrier") + 2 * softmaxes


def test_a_name_that_the_function_does_not_use_is_refused():
    with pytest.raises(ValueError, match=r"expected globals of run, got \['gone'\]"):
        with_names(run, gone=None)


def test_a_name_that_only_a_function_inside_uses_is_replaced():
    def outer():
        return (lambda: CASE)()

    assert with_names(outer, CASE="another")() == "another"
