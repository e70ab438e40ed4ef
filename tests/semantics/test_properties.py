from dataclasses import replace
from importlib import import_module

import jax
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import torch_attn
from tests.conftest import ON_GPU
from tests.oracle import assert_within_budget
from tests.sides import attention, by_reference, takes
from twin_attention.contract.spec import AttentionSpec
from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.inputs import Tensors, make_inputs
from twin_attention.targets import family

# No length fills a tile, so that every phase of a kernel has work. Laws share one problem, because
# JAX compiles each distinct one; in 16 bits, which every family takes.
CASE = FlashCase(
    "law", batch=1, seq_q=70, seq_kv=90, heads_q=2, heads_kv=1, head_dim=32, head_dim_v=16,
    dtype="bfloat16",
)  # fmt: skip
CAUSAL = replace(CASE, causal=True)

edges = st.sampled_from([n + i for n in (16, 32, 64, 96, 128) for i in (-1, 0, 1)])
lengths = st.integers(1, 150) | edges
sides_of_window = st.sampled_from([None, 0, 5, 40]) | edges
any_case = st.builds(
    FlashCase,
    name=st.just("any"),
    batch=st.integers(1, 2),
    seq_q=lengths,
    seq_kv=lengths,
    heads_q=st.sampled_from([2, 4]),
    heads_kv=st.sampled_from([1, 2]),
    head_dim=st.sampled_from([16, 40, 64, 72]),
    head_dim_v=st.sampled_from([16, 24, 64]),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    causal=st.booleans(),
    scale=st.sampled_from([None, 0.0, -0.2, 0.7]),
    window_size=st.none() | st.tuples(sides_of_window, sides_of_window),
    softcap=st.sampled_from([None, 2.0, 25.0]),
    sinks=st.booleans(),
    relative=st.none() | st.sampled_from([0, 1, 2, 3]) | edges,
)
# Query heads share a kv head, and some tile of keys has no full tile of queries to visit.
no_full_tiles = FlashCase(
    "any", batch=1, seq_q=35, seq_kv=82, heads_q=4, heads_kv=2, head_dim=32, head_dim_v=32,
    dtype="float16", causal=True, scale=0.7, softcap=25.0,
)  # fmt: skip


def equal(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@settings(max_examples=settings.default.max_examples // 10)
@given(case=any_case, seed=st.integers(0, 1000))
@example(case=no_full_tiles, seed=440)
def test_any_problem_is_within_budget(side, implementation, torch_device, case, seed):
    assume(takes(side, implementation, case))
    inputs = make_inputs(replace(case, name=f"any-{seed}"), torch_device)
    got = attention(side, inputs, implementation=implementation, **case.options)
    assert_within_budget(got, inputs, case.spec)


@settings(max_examples=settings.default.max_examples // 4)
@given(first=st.integers(1, CASE.seq_kv - 1))
def test_keys_that_a_query_does_not_see_do_not_matter(side, implementation, torch_device, first):
    inputs = make_inputs(CAUSAL, torch_device)
    k, v = inputs["k"].clone(), inputs["v"].clone()
    k[:, first:], v[:, first:] = 50, -50
    options = {"implementation": implementation, "causal": True}
    qkv = {name: inputs[name] for name in "qkv"}
    out, lse = attention(side, qkv, **options).values()
    other_out, other_lse = attention(side, qkv | {"k": k, "v": v}, **options).values()
    rows = max(0, first - CASE.spec.diagonal)
    assert torch.equal(out[:, :rows], other_out[:, :rows])
    assert torch.equal(lse[..., :rows], other_lse[..., :rows])
    assert (out[:, rows:] != other_out[:, rows:]).any(dim=-1).all()


def test_sequences_of_a_batch_do_not_meet(side, torch_device):
    """Bit for bit in the kernels; the reference's products may choose their order."""
    case = replace(CASE, batch=3, heads_q=2, heads_kv=1, window_size=(20, 10))
    inputs = make_inputs(case, torch_device)
    options = case.options | {"implementation": "triton"}
    order = [2, 0, 1]
    a = attention(side, inputs, **options)
    b = attention(side, {name: x[order] for name, x in inputs.items()}, **options)
    assert equal({name: x[order] for name, x in a.items()}, b)


def test_an_out_without_its_lse_has_gradients(side, implementation, torch_device):
    case = replace(CAUSAL, sinks=True)
    inputs = make_inputs(case, torch_device)
    del inputs["dlse"]
    operands = {name: x for name, x in inputs.items() if name != "dout"}
    options = case.options | {"implementation": implementation}
    found = side.call("flash_attention", operands, [inputs["dout"]], **options)
    got = dict(zip(("out", *(f"d{name}" for name in operands)), found, strict=True))
    got["lse"] = by_reference(inputs, **case.options)["lse"]
    assert_within_budget(got, inputs, case.spec)


def test_the_lse_alone_is_differentiable(side, implementation, torch_device):
    case = replace(CAUSAL, sinks=True)
    inputs = make_inputs(case, torch_device)
    inputs["dout"].zero_()
    got = attention(side, inputs, implementation=implementation, **case.options)
    assert_within_budget(got, inputs, case.spec)
    assert (got["dv"] == 0).all()
    assert (got["dq"] != 0).any(dim=-1).all()


@pytest.mark.skipif(not ON_GPU, reason="interpreters run a kernel's programs in order")
def test_the_backward_is_deterministic_when_asked(side, implementation, torch_device):
    case = replace(CAUSAL, heads_q=8, heads_kv=1, seq_q=2048, seq_kv=2048)
    inputs = make_inputs(case, torch_device)
    options = case.options | {"implementation": implementation, "deterministic": True}
    assert equal(attention(side, inputs, **options), attention(side, inputs, **options))


@pytest.mark.parametrize(
    ("of_framework", "asked"), [(True, None), (False, None), (True, False), (False, True)]
)
def test_determinism_follows_the_framework_unless_asked_for(
    side, torch_device, monkeypatch, asked, of_framework
):
    """The backward's function gets it as a part of the problem."""
    reference = import_module(f"{side.api.__name__}.kernels.reference")
    original, seen = reference.flash_bwd, []

    def spy(*args):
        seen.extend(arg.deterministic for arg in args if isinstance(arg, AttentionSpec))
        return original(*args)

    monkeypatch.setattr(reference, "flash_bwd", spy)
    monkeypatch.setattr(family, "_function", family._function.__wrapped__)  # without its cache
    flags = f"--xla_cpu_enable_fast_math=false --xla_gpu_deterministic_ops={of_framework}".lower()
    monkeypatch.setenv("XLA_FLAGS", flags)
    inputs = make_inputs(CASE, torch_device)
    if side.api is torch_attn:
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: of_framework)
    else:
        jax.clear_caches()
    options = CASE.options | {"implementation": "reference", "deterministic": asked}
    attention(type(side)(torch_device), inputs, **options)
    assert seen == [of_framework if asked is None else asked]


def test_large_scores_do_not_overflow(side, implementation, torch_device):
    """The exponential of a score is infinite, that of their distances is not."""
    case = replace(CASE, dtype="float16", scale=100.0)
    inputs = make_inputs(case, torch_device)
    got = attention(side, inputs, implementation=implementation, **case.options)
    assert float(got["lse"].min()) > 100
    assert_within_budget(got, inputs, case.spec)
