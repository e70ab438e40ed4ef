"""Tests of the cases that `python -m bench float32` times, and of its peer."""

from dataclasses import replace
from itertools import product

import pytest

from bench.job import Absent, Subject
from bench.peers import torch_peers
from bench.peers.torch_peers import EFFICIENT_ATTENTION, FLASH_ATTENTION
from bench.problems import attention_tensors
from bench.suites.float32 import columns, jobs
from interop.parity.cases import FlashCase

SMALL = FlashCase("small", 1, 48, 48, 2, 2, 16, dtype="float32", causal=True)


def test_both_precisions_of_every_shape_and_pass():
    found = jobs(["sm90", "sm80"])
    keys = ("dtype", "head_dim", "causal", "precision")
    wanted = product(["float32"], (64, 128), (False, True), ("ieee", "tf32"))
    passes = product(wanted, ("forward", "backward"))
    assert {(tuple(job.case[k] for k in keys), job.operation) for job in found} == set(passes)
    ours = {Subject(*x) for x in product(("torch triton", "jax triton"), ("sm90", "sm80"))}
    for job in found:
        assert set(job.factories) == ours | {Subject("SDPA efficient")}


def test_the_table_names_the_precision(record):
    for precision in ("ieee", "tf32"):
        (job, _) = jobs(["sm90"], f"{precision}-d128-causal")
        cells = columns(replace(record(), case=job.case))
        assert (cells["precision"], cells["d"], cells["causal"]) == (precision, 128, "yes")


def test_of_torchs_backends_the_efficient_one_takes_float32():
    """The adapter passes it on; a CPU has no such backend to run it."""
    tensors = attention_tensors(SMALL, "cpu")
    assert torch_peers.sdpa(EFFICIENT_ATTENTION, SMALL, "forward", tensors)
    with pytest.raises(Absent, match="takes float16 and bfloat16, not float32"):
        torch_peers.sdpa(FLASH_ATTENTION, SMALL, "forward", tensors)
