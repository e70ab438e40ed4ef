from dataclasses import replace

import pytest

import torch_attn
from tests.oracle import assert_within_budget
from tests.sides import strict_types
from twin_attention.interop.parity.__main__ import DEFAULT
from twin_attention.interop.parity.cases import DecodeCase, FlashCase
from twin_attention.interop.parity.check import worst
from twin_attention.interop.parity.inputs import make_inputs
from twin_attention.interop.parity.oracle import expectations, parts_of
from twin_attention.interop.parity.sides import SIDES, Ours, PallasSide, plan
from twin_attention.interop.parity.subjects.subject import twins
from twin_attention.interop.parity.suites.append import append_cases
from twin_attention.interop.parity.suites.context import context_cases
from twin_attention.interop.parity.suites.decode import decode_cases
from twin_attention.interop.parity.suites.merge import merge_cases
from twin_attention.targets.family import families_of
from twin_attention.targets.target import requested_target

CASE = FlashCase("run", seq_q=5, seq_kv=7, heads_q=2, heads_kv=1, head_dim=16, causal=True)


def test_each_target_is_a_group_and_the_reference_runs_once():
    groups = plan(("triton", "reference"), ("sm90", "sm80"))
    assert [[subject.label for subject in group] for group in groups] == [
        [
            "torch_attn triton sm90",
            "pallas_attn triton sm90",
            "torch_attn reference",
            "pallas_attn reference",
        ],
        ["torch_attn triton sm80", "pallas_attn triton sm80"],
    ]


def test_explicit_kernels_run_for_their_target_alone():
    of_sm80 = [
        "torch_attn gluon sm80", "pallas_attn gluon sm80", "pallas_attn mosaic sm80",
        "torch_attn triton sm80", "pallas_attn triton sm80",
    ]  # fmt: skip
    of_sm90 = [
        "torch_attn gluon sm90", "pallas_attn gluon sm90", "pallas_attn mosaic sm90",
        "torch_attn triton sm90", "pallas_attn triton sm90",
    ]  # fmt: skip
    for targets, expected in (
        (("sm90", "sm80"), [of_sm90, of_sm80]),
        (("sm80",), [of_sm80]),
        ((None,), [["torch_attn triton", "pallas_attn triton"]]),
    ):
        groups = plan(("gluon", "mosaic", "triton"), targets)
        assert [[subject.label for subject in group] for group in groups] == expected
    assert plan(("gluon", "mosaic"), (None,)) == [[]]
    ((foreign,),) = plan(("torch_triton",), (None,))
    assert foreign.supports(replace(CASE, dtype="bfloat16", batch_invariant=True)) is None
    assert foreign.supports(CASE) == "the other side interprets the same kernels"


def test_by_default_every_family_with_kernels_runs_in_every_framework():
    (group,) = plan(DEFAULT, ("sm90",))
    assert {(x.side, x.implementation) for x in group} == {
        (side, family.name) for side in SIDES for family in families_of(side) if family.folder
    }


def test_a_subject_supports_what_its_family_does():
    gluon = Ours("torch_attn", "gluon", "sm80")
    assert gluon.supports(replace(CASE, dtype="bfloat16")) is None
    assert gluon.supports(replace(CASE, dtype="float32")) is not None
    assert gluon.supports(DecodeCase("decode")) is not None
    assert Ours("torch_attn", "triton", "sm80").supports(DecodeCase("decode")) is None
    assert Ours("pallas_attn", "mosaic", "sm90").supports(CASE) is not None
    assert Ours("pallas_attn", "reference").supports(CASE) is None


def test_twins_are_all_pairs_across_the_sides():
    (group,) = plan(("triton", "reference"), (None,))
    pairs = {(a.label, b.label) for a, b in twins(group)}
    assert pairs == {
        (f"torch_attn {a}", f"pallas_attn {b}")
        for a in ("triton", "reference")
        for b in ("triton", "reference")
    }


@pytest.mark.parametrize("name", ["decode-bf16", "decode-int8", "decode-fp8"])
def test_jax_gets_the_memory_of_the_pool(name, torch_device):
    (case,) = decode_cases("small", name)
    inputs = make_inputs(case, torch_device)
    arrays = PallasSide().share(inputs)
    assert arrays.keys() == inputs.keys()
    for argument, x in inputs.items():
        assert arrays[argument].unsafe_buffer_pointer() == x.data_ptr(), argument


def test_a_subject_runs_for_its_target(monkeypatch, torch_device):
    seen = []
    real = torch_attn.flash_attention

    def attend(*args, **kwargs):
        seen.append(requested_target())
        return real(*args, **kwargs)

    monkeypatch.setattr(torch_attn, "flash_attention", attend)
    Ours("torch_attn", "reference", "sm80").start()(CASE, make_inputs(CASE, torch_device))
    assert seen == ["sm80"]


@pytest.mark.parametrize("case", context_cases(), ids=lambda case: case.name)
def test_ranks_on_both_sides(case):
    inputs = make_inputs(case, "cpu")
    expected = expectations(inputs, parts_of(case.spec))
    sides = [Ours(side, "reference") for side in SIDES]
    found = [subject for subject in sides if subject.supports(case) is None]
    assert len(found) == (1 if case.exchange == "gather" else 2)
    for subject in found:
        with strict_types():
            results = subject.start()(case, inputs)
        assert worst(results, expected) <= 1
        assert case.exchange in str(subject.explain(case, inputs))


@pytest.mark.parametrize("case", [*append_cases("small", "packed"), *merge_cases("small", "bf16")])
def test_jax_interprets_kernels_of_torch_attn(case):
    """Attention is among the named cases of `batch_invariant`."""
    inputs = make_inputs(case, "cpu")
    assert_within_budget(
        Ours("pallas_attn", "torch_triton").start()(case, inputs), inputs, case.spec
    )
