"""On a GPU the kernels of `torch_attn` give the same bits whichever framework launches them."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
import torch

import pallas_attn
import torch_attn
from interop.exchange import to_jax, to_torch
from interop.parity.cases import KINDS, Case, FlashCase, VarlenCase
from interop.parity.inputs import make_inputs
from interop.parity.sides import Subject, run, supports
from torch_attn.targets import target_of
from twin_attention.targets.target import use_target

if not torch.cuda.is_available() or jax.default_backend() != "gpu":
    pytest.skip("needs a GPU in both frameworks", allow_module_level=True)

NATIVE = target_of(torch.device("cuda"))
TARGETS = [NATIVE] + ["sm80"] * (NATIVE == "sm90")
CASES = [
    replace(case, deterministic=True)  # otherwise sums are of any order, in each call
    for cases in KINDS
    for case in cases("quick")
    if isinstance(case, FlashCase | VarlenCase) and not case.spec.is_empty
]


@pytest.mark.parametrize("name", ["gluon", "triton"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_bits_are_equal(case: Case, target: str, name: str):
    ours = Subject("pallas_attn", "gluon" if name == "gluon" else "torch_triton", target)
    theirs = Subject("torch_attn", name, target)
    if not (supports(ours, case) and supports(theirs, case)):
        pytest.skip("a side does not support the problem")
    inputs = make_inputs(case, "cuda")
    found, expected = run(ours, case, inputs), run(theirs, case, inputs)
    expected.pop("dsinks", None)  # a sum that each framework takes by itself
    for x, value in expected.items():
        assert torch.equal(found[x], value), x


def test_a_program_of_both_frameworks():
    """Scan, vmap and a donated operand change no bit."""
    q, k, v = (torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    attention = partial(pallas_attn.flash_attention, causal=True, implementation="gluon")
    arrays = [to_jax(x) for x in (q, k, v)]

    def layers(x, k, v):
        return jax.lax.scan(lambda x, _: (attention(x, k, v), None), x, None, 3)[0]

    expected = q
    for _ in range(3):
        expected = torch_attn.flash_attention(expected, k, v, causal=True, implementation="gluon")
    found = jax.jit(layers, donate_argnums=0)(arrays[0] + 0, *arrays[1:])
    assert torch.equal(to_torch(found), expected)
    with use_target(None):
        each = jax.jit(jax.vmap(attention))(*(x[:, None] for x in arrays))
    alone = torch_attn.flash_attention(q, k, v, causal=True, implementation="gluon")
    assert torch.equal(to_torch(jnp.squeeze(each, 1)), alone)
