import os
import signal
from functools import partial

import pytest

from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.fuzz import command
from twin_attention.interop.parity.fuzz.problems import Problem
from twin_attention.interop.parity.fuzz.trial import run_problem
from twin_attention.interop.parity.report import write_table
from twin_attention.interop.parity.subjects.libraries import LIBRARIES
from twin_attention.interop.parity.subjects.library import Library

pytestmark = pytest.mark.usefixtures("one_thread")

DENSE = FlashCase("lse", 1, 20, 30, 4, 2, 32, dtype="float16", causal=True, scale=0.3)


@pytest.mark.parametrize(
    ("name", "case", "outputs"),
    [
        ("FA2", DENSE, {"out", "lse", "dq", "dk", "dv"}),
        ("transformers gpt-oss", FlashCase("sinks", 1, 9, 9, 2, 2, sinks=True, causal=True),
         {"out", "dq", "dk", "dv", "dsinks"}),
    ],
)  # fmt: skip
def test_what_a_library_returns_is_checked(name, case, outputs):
    result = run_problem(Problem(case), [[LIBRARIES[name].on("cpu")]], "cpu")
    assert {c.output for c in result.comparisons} == outputs
    assert all(c.ok or c.output == "lse" for c in result.comparisons), result


def dies_if_causal(case, tensors):
    if case.causal:
        os.kill(os.getpid(), signal.SIGSEGV)
    return lambda q, k, v: v


@pytest.mark.usefixtures("forked_workers")
def test_a_library_whose_process_dies_is_in_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "SHRINK_SECONDS", 0.1)
    claims = frozenset({"flash_attention", "bfloat16", "causal"})
    dies = Library("dies", "torch", "torch", dies_if_causal, claims)
    named, write = [FlashCase("a", causal=True)], partial(write_table, folder=tmp_path)
    assert not command.fuzz([[dies]], "cpu", None, 0, 1, named, write)
    table = (tmp_path / "conformance.md").read_text()
    assert "| causal | 0 of 1, 0.00 |" in table
    assert "\ndies: worker process died: SIGSEGV" in table
    assert "--subject dies --problem" in table
