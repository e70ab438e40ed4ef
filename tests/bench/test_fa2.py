"""The jobs of `python -m bench fa2`."""

from dataclasses import replace

import pytest

from bench.job import Subject
from bench.suites.fa2 import cases, columns, jobs

TARGETS = ["sm90", "sm80"]


def test_every_shape_kv_heads_and_mask_in_float16():
    found = [(c.batch, c.seq_q, c.seq_kv, c.heads_q, c.heads_kv, c.causal) for c in cases()]
    assert found == [
        (batch, seq_q, seq_kv, 32, heads_kv, causal)
        for causal in (False, True)
        for heads_kv in (32, 8)
        for batch, seq_q, seq_kv in ((16, 1024, 1024), (4, 1024, 4096), (1, 4096, 4096))
    ]
    assert {(c.head_dim, c.dtype) for c in cases()} == {(128, "float16")}
    assert [job.case["name"] for job in jobs(TARGETS)] == [case.name for case in cases()]
    assert {job.operation for job in jobs(TARGETS)} == {"forward"}


def test_each_side_stands_beside_both_peers():
    for job in jobs(TARGETS):
        names = [subject.implementation for subject in job.factories if subject.target]
        assert names.count("torch triton") == 2
        assert names.count("jax triton") == (2 if job.case["heads_kv"] == 32 else 1)
        assert {Subject("FA2"), Subject("cuDNN")} <= set(job.factories)


@pytest.mark.parametrize("heads_kv", [32, 8])
def test_a_causal_rectangle_has_more_than_half_of_the_flops(heads_kv):
    (job,) = jobs(TARGETS, f"4x1024x4096-kv{heads_kv}-causal")
    hidden = sum(range(1024))  # of the first query 1023 pairs, of the last none
    assert job.flops == 4 * 128 * 4 * 32 * (1024 * 4096 - hidden)


def test_columns_of_a_record_with_and_without_a_time(record):
    case = jobs(TARGETS, "4x1024x4096-kv8-causal")[0].case
    gpu = {"sm_mhz": 1755.0, "watts": 620.5}
    assert columns(replace(record(), case=case, gpu=gpu)) == {
        "bs": 4, "Sq": 1024, "Skv": 4096, "heads kv": 8, "causal": "yes",
        "TFLOP/s": 100.0, "SM clock, MHz": 1755.0, "power, W": 620.5,
    }  # fmt: skip
    cells = columns(replace(record(status="failed", message="gone"), case=case))
    assert cells["TFLOP/s"] is cells["SM clock, MHz"] is cells["power, W"] is None
