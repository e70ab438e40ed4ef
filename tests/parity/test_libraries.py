"""Other libraries' attention as subjects: what they return, and how they are run."""

import pytest

from twin_attention.interop.parity.cases import FlashCase
from twin_attention.interop.parity.fuzz.problems import Problem
from twin_attention.interop.parity.fuzz.trial import run_problem
from twin_attention.interop.parity.subjects.libraries import LIBRARIES

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
