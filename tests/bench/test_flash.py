"""What `python -m bench flash` measures, and where it leaves something out."""

from dataclasses import replace

import pytest

from bench import problems
from bench.job import Absent, Subject
from bench.ours import NAMES
from bench.peers import FLASH
from bench.records import Times
from bench.suites.flash import cases, columns, jobs

TARGETS = ["sm90", "sm80"]


def test_the_grid():
    assert [case.name for case in cases() if not case.causal] == [
        "32x512x32x64", "4x4096x32x64", "1x16384x32x64",
        "32x512x16x128", "4x4096x16x128", "1x16384x16x128",
        "32x512x8x256", "4x4096x8x256", "1x16384x8x256",
    ]  # fmt: skip
    assert len(cases()) == 18
    for case in cases():
        batch, seq, heads, dim = map(int, case.name.removesuffix("-causal").split("x"))
        assert case.shapes == ((batch, seq, heads, dim),) * 3
        assert case.causal == case.name.endswith("-causal")


def test_forward_and_backward_of_every_case_with_every_subject():
    found = jobs(TARGETS)
    assert [job.case["name"] for job in found[::2]] == [case.name for case in cases()]
    assert [job.operation for job in found] == ["forward", "backward"] * 18
    ours = {Subject(name, target) for name in NAMES for target in TARGETS}
    for job in found:
        assert set(job.factories) == ours | {Subject(name) for name in FLASH}


def test_the_filter_is_part_of_a_name():
    assert [job.case["name"] for job in jobs(TARGETS, "512x16x128-causal")] == [
        "32x512x16x128-causal"
    ] * 2


SLOW = {
    "torch triton compiled sm90", "torch triton compiled sm80", "FlexAttention", "jax.nn XLA",
    "jax Pallas mha", "tokamax Triton",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "absent"),
    [
        ("4x4096x16x128", set()),
        ("4x4096x32x64", SLOW),
        ("1x16384x16x128", SLOW | {"eager", "jax.nn cuDNN", "jax triton sm80"}),
    ],
)
def test_who_is_left_out_and_where(name, absent):
    for job in jobs(TARGETS, name):
        left_out = {subject: m for subject, m in job.factories.items() if m.func is problems.absent}
        assert {" ".join(filter(None, subject)) for subject in left_out} == absent
        for make in left_out.values():
            with pytest.raises(Absent, match="timed at 4096 keys"):
                make([])


def test_flops_are_those_of_the_pairs_that_the_mask_keeps():
    forward, backward = jobs(["sm90"], "4x4096x16x128-causal")
    pairs = 4 * 16 * 4096 * 4097 // 2
    assert (forward.flops, backward.flops) == (4 * 128 * pairs, 10 * 128 * pairs)


def test_columns_of_a_record_with_and_without_a_time(record):
    case = jobs(TARGETS, "4x4096x16x128-causal")[0].case
    timed = replace(record(), case=case, host=Times(0.02, 0.02, 0.02))
    assert columns(timed) == {
        "B": 4, "S": 4096, "H": 16, "D": 128, "causal": "yes", "pass": "forward",
        "TFLOP/s": 100.0, "host, us": 20.0,
    }  # fmt: skip
    cells = columns(replace(record(status="absent", operation="backward"), case=case))
    assert cells["pass"] == "backward"
    assert cells["TFLOP/s"] is cells["host, us"] is None
