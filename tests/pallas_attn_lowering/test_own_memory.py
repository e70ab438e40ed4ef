"""Kernels never write into slices of larger arrays."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_attn import append_kv, flash_attention, private
from pallas_attn.lowering import recording
from twin_attention.interop.parity.cases import AppendCase, FlashCase
from twin_attention.interop.parity.sides import Ours
from twin_attention.targets.family import FOREIGN
from twin_attention.targets.target import use_target

FLASH = FlashCase("gradients", batch=1, seq_q=64, seq_kv=64)
APPEND = AppendCase("append", lengths=(40, 300), max_pages=32)
KERNELS = r"stablehlo.custom_call @(?:triton_kernel_call_ffi|mosaic_gpu_v2)\((.*)"


def gradients(q, k, v, dout, **options):
    return jax.vjp(partial(flash_attention, **options), q, k, v)[1](dout)


def arrays(*shapes, dtype="bfloat16"):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


OF_GRADIENTS = arrays(*[(1, 64, 2, 64)] * 4)
OF_APPEND = [
    *arrays(*[(2, 2, 64)] * 2, *[(64, 16, 2, 64)] * 2),
    *arrays((2, 32), (2,), dtype=jnp.int32),
]


@pytest.mark.parametrize(
    ("implementation", "case", "function", "operands", "kernels", "in_place"),
    [
        ("triton", APPEND, append_kv, OF_APPEND, 1, 2),
        ("torch_triton", APPEND, append_kv, OF_APPEND, 1, 2),
        ("mosaic", FLASH, gradients, OF_GRADIENTS, 4, 1),
        ("gluon", FLASH, gradients, OF_GRADIENTS, 4, 0),
    ],
    ids=["triton", "torch_triton", "mosaic", "gluon"],
)
def test_each_array_that_is_written_has_a_barrier_of_its_own(
    implementation, case, function, operands, kernels, in_place
):
    is_foreign = implementation in (x.name for x in FOREIGN["pallas_attn"])
    if Ours("pallas_attn", implementation, "sm80").supports(case) is not None:
        pytest.skip(f"{implementation} does not run here")
    if is_foreign and not hasattr(private.gpu_triton, "TritonKernel"):
        pytest.skip("jaxlib's CUDA plugin is not installed")
    with use_target("sm80"), recording():
        traced = jax.jit(partial(function, implementation=implementation)).trace(*operands)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(rf"%\w+(?::(\d+))? = {KERNELS}", text)
    assert len(calls) == kernels
    results = sum(int(number or 1) for number, _ in calls)
    barriers = re.findall(r"stablehlo.optimization_barrier (.*?) :", text)
    assert len(barriers) >= results + in_place  # a function that has a kernel may be called twice
    assert not any("," in operands for operands in barriers)
