"""On a GPU a kernel gives the same bits whichever framework launches it.

`dilated_attention` merges pairs in each framework. The merge's gradient sums over Dv in other
orders, so gradients are compared for one pair only, and results of several pairs only where JAX
launches torch's merge.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
import torch

import pallas_attn
import torch_attn
from torch_attn.targets import target_of
from twin_attention.contract.spec import PartialSpec
from twin_attention.interop.exchange import to_jax, to_torch
from twin_attention.interop.parity.cases import Case, DilatedCase
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.sides import Ours
from twin_attention.interop.parity.suites.kinds import KINDS
from twin_attention.targets.target import use_target

if not torch.cuda.is_available() or jax.default_backend() != "gpu":
    pytest.skip("needs a GPU in both frameworks", allow_module_level=True)

NATIVE = target_of(torch.device("cuda"))
TARGETS = [NATIVE] + ["sm80"] * (NATIVE == "sm90")

# Who launches the other side's kernels, by which name, and what that side calls them.
PAIRS = {
    "gluon in JAX": (("pallas_attn", "gluon"), ("torch_attn", "gluon")),
    "triton in JAX": (("pallas_attn", "torch_triton"), ("torch_attn", "triton")),
}
NAMED = [case for cases in KINDS for case in cases("full") if "full" not in case.name]
ALL = [case for case in NAMED if not case.spec.is_empty]
SEVERAL_PAIRS = [x for x in ALL if isinstance(x, DilatedCase) and len(x.dilation_rates) > 1]
ONE_PAIR = [
    replace(
        case,
        name=f"{case.name}-one-pair",
        segment_lengths=case.segment_lengths[:1],
        dilation_rates=case.dilation_rates[:1],
    )
    for case in SEVERAL_PAIRS
]
MERGED = {case.name for case in SEVERAL_PAIRS}
CASES = [
    # Otherwise sums are of any order, in each call.
    replace(case, deterministic=True) if hasattr(case, "deterministic") else case
    for case in (*ALL, *ONE_PAIR)
]
SUMS = {"dsinks", "dbias", "drelative_bias", "douts", "dlses"}
GRADIENTS = {"dq", "dk", "dv"}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_bits_are_equal(case: Case, target: str, pair: str):
    ours, theirs = (Ours(*subject, target) for subject in PAIRS[pair])
    if not (ours.supports(case) is None and theirs.supports(case) is None):
        pytest.skip("a side does not support the problem")
    if isinstance(getattr(case, "part", None), PartialSpec):
        pytest.skip("each framework exchanges keys in its own steps")
    if pair != "triton in JAX" and case.name in MERGED:
        pytest.skip("each framework merges in a kernel of its own")
    inputs = make_inputs(case, "cuda")
    found, expected = ours.start()(case, inputs), theirs.start()(case, inputs)
    own = SUMS | GRADIENTS if case.name in MERGED else SUMS
    for x in expected.keys() - own:
        bits = [y[x].contiguous().view(torch.uint8) for y in (found, expected)]
        assert torch.equal(*bits), x


def test_a_program_of_both_frameworks():
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
