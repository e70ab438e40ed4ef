"""`batch_invariant`: training, prefill in chunks and decoding give the same bits.

The law of `make fuzz` compares bits, on a CPU those of the interpreter. The suites of parity have
cases for the budget.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import pallas_attn
from tests.oracle import assert_within_budget
from tuning.static.gate import decode_spec
from tuning.static.triton_aot import compile_kernels
from twin_attention.interop.kernels import in_jax
from twin_attention.interop.parity.cases import Case, DecodeCase, FlashCase, PagedCase, VarlenCase
from twin_attention.interop.parity.fuzz.schedules import differing_bits
from twin_attention.interop.parity.inputs import GRADIENTS, Tensors, make_inputs
from twin_attention.interop.parity.sides import Ours
from twin_attention.interop.parity.subjects.subject import Run
from twin_attention.targets import sm90
from twin_attention.targets.config import find_configs, load_table, table_path, use_configs
from twin_attention.targets.invariant import BLOCK, SPAN
from twin_attention.targets.target import TARGETS, use_target

ON_GPU = torch.cuda.is_available()
TRITON, IN_JAX = Ours("torch_attn", "triton"), Ours("pallas_attn", "torch_triton")
FASTEST = Ours("torch_attn", None), Ours("pallas_attn", None)
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"window_size": (130, 0)}, {"softcap": 4.0})
LENGTHS = (1, 17, 64, 65, 600, 2047, 2049, 4500) if ON_GPU else (1, 2, 63, 64, 65, 70, 150)
FUNCTIONS = {
    "flash_attention": FlashCase("", head_dim=16, batch_invariant=True),
    "paged_attention": PagedCase(
        "", (70, 0, 9), new_tokens=(20, 0, 9), head_dim=16, batch_invariant=True
    ),
}


def attended(run: Run, case: Case, device: str) -> tuple[Tensors, Tensors]:
    """Return inputs without gradients, and results."""
    inputs = {x: y for x, y in make_inputs(case, device).items() if x not in GRADIENTS}
    return inputs, run(case, inputs)


@pytest.mark.parametrize("seed", range(200 if ON_GPU else 4))
def test_other_schedules_and_jax_give_the_same_bits(seed, torch_device):
    """Without a GPU half of the seeds run in JAX."""
    rng = np.random.default_rng(seed)
    lengths = tuple((int(n), int(n)) for n in rng.choice(LENGTHS, rng.integers(1, 4)))
    case = VarlenCase(
        f"schedules {seed}", lengths, heads_q=4, heads_kv=(1, 4)[seed // 2 % 2], sinks=True,
        head_dim=(64, 128)[seed % 2], batch_invariant=True, **OPTIONS[seed % 3],
    )  # fmt: skip
    inputs, results = attended(TRITON.start(), case, torch_device)
    for other in (TRITON, IN_JAX, *FASTEST) if ON_GPU else ((TRITON, IN_JAX)[seed // 2],):
        assert differing_bits(other.start(), case, inputs, results, most=4) is None


@pytest.mark.parametrize("fault", ["a kernel by shape", "rescaled by a neighbour"])
def test_faults_are_noticed(fault, torch_device):
    right = TRITON.start()

    def run(case: Case, inputs: Tensors) -> Tensors:
        by_shape = fault == "a kernel by shape" and isinstance(case, DecodeCase)
        results = right(replace(case, batch_invariant=not by_shape), inputs)
        if fault == "rescaled by a neighbour":
            most = results["lse"].amax(-1, keepdim=True)
            results["lse"] = results["lse"] + most - most
        return results

    case = VarlenCase(fault, ((70, 70), (9, 9)), batch_invariant=True)
    found = differing_bits(run, case, *attended(right, case, torch_device), most=4)
    assert found is not None
    assert found.startswith("decoded") or fault != "a kernel by shape"


def test_rows_without_keys_have_the_bits_of_empty_calls(torch_device):
    case = VarlenCase("", ((3, 0), (4, 2)), head_dim=16, sinks=True, batch_invariant=True)
    inputs, packed = attended(TRITON.start(), case, torch_device)
    empty = FlashCase("", 1, 3, 0, head_dim=16, sinks=True, batch_invariant=True)
    for subject in (TRITON, IN_JAX):
        alone = {"q": inputs["q"][None, :3], "sinks": inputs["sinks"]}
        alone |= dict.fromkeys("kv", inputs["k"][None, :0])
        results = subject.start()(empty, alone)
        assert torch.equal(results["lse"][0], packed["lse"][:, :3])
        assert torch.equal(results["out"][0], packed["out"][:3])
    assert torch.equal(packed["lse"][:, :5], inputs["sinks"][:, None].expand(-1, 5))


@pytest.mark.parametrize("options", [{}, {"window_size": (100, 0), "sinks": True}])
def test_a_merge_of_spans_has_the_bits_of_a_program_over_all(options, torch_device):
    case = DecodeCase(
        "", (40, 0, 2048, 4099), tokens=2, heads_q=2, head_dim=16, page_size=128, max_pages=34,
        batch_invariant=True, **options,
    )  # fmt: skip
    inputs = make_inputs(case, torch_device)
    one, several = (TRITON.start()(replace(case, num_splits=n), inputs) for n in (1, 2))
    assert_within_budget(one, inputs, case.spec)
    for name, x in one.items():
        assert torch.equal(x, several[name]), name


def test_all_configurations_have_the_same_blocks():
    found = []
    for target, name in product(TARGETS, ("flash_fwd", "paged_decode", "paged_attention")):
        rows = load_table(table_path("torch_attn", target))[name]
        found += [vars(x.config) for x in rows if "batch invariant" in dict(x.key)["when"]]
    packed = VarlenCase("", ((9000, 9000),), causal=True)
    chunks = PagedCase("", (9000,), new_tokens=(9000,))
    for case, d in product((packed, replace(packed, window_size=(9, 0)), chunks), range(8, 136, 8)):
        spec = replace(case, head_dim=d, batch_invariant=True).spec
        configs = find_configs(table_path("torch_attn", "sm90", "sm90"), spec, "sm90")
        found += [vars(configs[x]) for x in ("flash_fwd", "paged_attention") if x in configs]
    assert {x["block_kv"] for x in found} == {BLOCK}
    assert SPAN % BLOCK == 0


def test_gradients_of_capped_scores_keep_their_kernels():
    spec = FlashCase("", softcap=4.0, batch_invariant=True).spec
    assert sm90.supports("flash_fwd", spec, "sm90") is not None
    assert sm90.supports("flash_bwd", spec, "sm90") is None


@pytest.mark.parametrize("warps", [1, 2, 4])
def test_sums_stay_in_the_order_of_their_block(warps):
    """Warps that share rows have whole parts of a sum: no step converts its layout."""
    spec = decode_spec("bfloat16", 128, 2, 4, tokens=1, max_pages=8)
    with use_configs({"paged_decode": {"num_warps": warps}}):
        _, _, found = compile_kernels(replace(spec, batch_invariant=True), "sm90")[0]
    steps = re.findall(r"scf\.for.*?scf\.yield", found.asm["ttgir"], re.DOTALL)
    assert steps
    assert not re.search(r"convert_layout.*xf32", "\n".join(steps))


REFUSED = {
    "takes no segment ids": FlashCase("", segments="documents", causal=True),
    "alibi_slopes and dropout": FlashCase("", dropout_rate=0.1),
    "head dimensions up to 128": FlashCase("", head_dim=136),
    "values in float16 and bfloat16": DecodeCase("", kv_dtype="int8"),
    "takes no tree_ends": DecodeCase("", tokens=3, tree="drafts"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_the_kernels_lack_is_refused(reason):
    case = replace(REFUSED[reason], batch_invariant=True)
    with pytest.raises(NotImplementedError, match=re.escape(reason)):
        TRITON.start()(case, make_inputs(case, "cpu"))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_other_kernels_run(name):
    """None would be the reference on a CPU; without torch JAX says what is missing."""
    inputs = make_inputs(FUNCTIONS[name], "cpu")
    others = ("reference",) if ON_GPU else (None, "reference")
    for side, other in product(("torch_attn", "pallas_attn"), others):
        with pytest.raises(NotImplementedError, match="only Triton kernels of torch_attn"):
            Ours(side, other).start()(FUNCTIONS[name], inputs)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", [None, "triton", "torch_triton"])
def test_jax_without_torch_says_so(name, monkeypatch):
    monkeypatch.setattr(in_jax, "find_spec", lambda name: None)
    q = jax.ShapeDtypeStruct((1, 4, 2, 64), jnp.bfloat16)
    attend = partial(pallas_attn.flash_attention, batch_invariant=True, implementation=name)
    missing = "only Triton kernels of torch_attn" if name == "triton" else "is not installed"
    with use_target("sm90"), pytest.raises(NotImplementedError, match=missing):
        jax.eval_shape(attend, q, q, q)
