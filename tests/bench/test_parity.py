from functools import partial

import pytest

from bench.job import Entry
from bench.parity import ParityJob
from twin_attention.interop.parity.sides import Ours
from twin_attention.interop.parity.suites.flash import flash_cases
from twin_attention.interop.parity.suites.merge import merge_cases

(MERGE,) = merge_cases("small", "merge-bf16")
(FLASH,) = flash_cases("small", "one-token")
TRITON = Entry("torch triton"), Entry("jax triton")


def records_of(job, origin):
    return job.measure(job.plan(origin | {"suite": "parity"}), None, lambda step: None)


@pytest.mark.parametrize("case", [MERGE, FLASH], ids=lambda case: case.name)
def test_right_results_have_an_error_and_no_times(origin, case):
    found = records_of(ParityJob(case, TRITON, "cpu"), origin)
    assert [(record.label, record.status, record.times) for record in found] == [
        ("torch triton", "ok", None), ("jax triton", "ok", None),
    ]  # fmt: skip
    assert all(0 <= record.error <= 1 for record in found)
    assert found[0].operation == "parity"


def test_a_wrong_result_is_refused_and_named(origin, monkeypatch):
    start = Ours.start

    def wrong(subject, *problem):
        found = start(subject)(*problem)
        return found | {"out": found["out"] + 1} if subject.side == "torch_attn" else found

    monkeypatch.setattr(Ours, "start", lambda subject: partial(wrong, subject))
    torch, jax = records_of(ParityJob(MERGE, TRITON, "cpu"), origin)
    assert (torch.status, jax.status) == ("refused by parity",) * 2  # and jax's twin disagrees
    assert torch.error > 1
    assert torch.message == f"the error of out is {torch.error:.3g} times the budget"


def test_what_has_no_kernels_is_absent_and_what_raises_failed(origin, monkeypatch):
    def no(subject):
        raise RuntimeError("no such card")

    monkeypatch.setattr(Ours, "start", no)
    job = ParityJob(MERGE, (Entry("torch gluon", "sm80"), Entry("torch triton")), "cpu")
    assert [record.status for record in records_of(job, origin)] == ["absent", "failed"]


def test_implementations_are_chosen_by_name():
    job = ParityJob(MERGE, TRITON, "cpu")
    assert job.only(["torch"]).subjects == [Entry("torch triton")]
    assert job.only(["FA2"]) is None
