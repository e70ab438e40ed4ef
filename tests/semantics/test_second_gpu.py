"""Kernels run where their operands are, on the current GPU or not."""

import jax
import pytest
import torch

from tests.sides import SIDES, attention
from twin_attention.interop.parity.cases import DecodeCase, FlashCase
from twin_attention.interop.parity.environment import choose_device
from twin_attention.interop.parity.inputs import make_inputs

FLASH = FlashCase(
    "second-gpu", seq_q=200, seq_kv=300, heads_q=4, heads_kv=2, head_dim=64, dtype="float16",
    causal=True,
)  # fmt: skip
DECODE = DecodeCase(
    "second-gpu", lengths=(0, 5, 700), tokens=3, heads_q=4, heads_kv=2, head_dim=64,
    dtype="float16", page_size=16, max_pages=44,
)  # fmt: skip

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def results(name, gpu):
    side = SIDES[name](f"cuda:{gpu}")
    flash, decode = (
        {name: x.to(side.device) for name, x in make_inputs(case, "cpu").items()}
        for case in (FLASH, DECODE)
    )
    with jax.default_device(jax.devices()[gpu]):
        got = (
            *attention(side, flash, **FLASH.options | {"deterministic": True}).values(),
            *side.call("paged_decode", decode, return_lse=True, **DECODE.options),
        )
    return [x.cpu() for x in got]


@pytest.mark.parametrize("name", SIDES)
def test_results_are_those_of_the_current_gpu(name):
    choose_device()
    want = results(name, 0)
    with torch.cuda.device(0):
        got = results(name, 1)
    assert all(map(torch.equal, got, want))


def test_the_gpu_that_jax_takes_becomes_the_current_one():
    torch.cuda.set_device(1)
    assert choose_device() == "cuda"
    assert torch.cuda.current_device() == jax.devices()[0].local_hardware_id == 0
