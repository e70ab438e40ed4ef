"""The forward without its softmax: what it computes, and that nobody else gets it."""

import pytest
import torch

from bench.ablation import _with_names, flash_fwd_without_softmax
from interop.parity.cases import FlashCase
from interop.parity.inputs import make_inputs
from torch_attn import launch
from torch_attn.kernels.portable.flash_fwd import flash_fwd
from tuning.static import triton_aot
from twin_attention.contract.operands import FlashOperands
from twin_attention.targets.family import portable_backend
from twin_attention.targets.target import TARGETS

CASE = FlashCase(
    "ablation", batch=1, seq_q=64, seq_kv=128, heads_q=2, heads_kv=1, head_dim=32, dtype="float16"
)


def test_it_is_the_two_products_alone():
    inputs = make_inputs(CASE, "cpu")
    q, k, v = (inputs[name] for name in "qkv")
    backend = portable_backend("torch_attn", None)
    out, _ = flash_fwd_without_softmax()(FlashOperands(q, k, v), CASE.spec, backend)
    s = torch.einsum("bqhd,bkd->bhqk", q.double(), k[:, :, 0].double())
    expected = torch.einsum("bhqk,bkd->bqhd", s, v[:, :, 0].double())
    torch.testing.assert_close(out.double(), expected, rtol=0.01, atol=0.5)


@pytest.mark.parametrize("target", TARGETS)
def test_it_has_no_exponential_and_the_shipped_kernel_still_has(target):
    shape = (1, 256, 4, 128)
    operands = FlashOperands(
        *(torch.empty(shape, dtype=torch.float16, device="meta") for _ in range(3))
    )
    spec = FlashCase("", 1, 256, 256, 4, 4, 128, dtype="float16").spec
    backend = portable_backend("torch_attn", target)
    with triton_aot._driver(target), launch.recording() as compiled:
        flash_fwd_without_softmax()(operands, spec, backend)
        flash_fwd(operands, spec, backend)
    without, shipped = (kernel.asm["ptx"] for _, _, kernel in compiled)
    assert "ex2.approx" not in without
    assert "ex2.approx" in shipped
    product = {"sm80": "mma.sync", "sm90": "wgmma.mma_async"}[target]
    assert product in without


def test_a_name_that_the_function_does_not_use_is_refused():
    with pytest.raises(ValueError, match=r"expected globals of flash_fwd, got \['gone'\]"):
        _with_names(flash_fwd, gone=None)
