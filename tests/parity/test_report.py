import json
import math
import re
from dataclasses import asdict, replace

import pytest

from twin_attention.contract.tolerances import Agreement
from twin_attention.interop.parity.cases import DecodeCase, FlashCase
from twin_attention.interop.parity.records import (
    ORACLE,
    CaseResult,
    Comparison,
    Report,
    RunRecord,
    function_of,
    problem_text,
    without_rounds,
)
from twin_attention.interop.parity.report import to_page, write_table
from twin_attention.interop.parity.suites.kinds import KINDS

GOOD = Agreement(0.25, 0.5, 0.125, 1.0)
BAD = Agreement(0.75, 0.5, 0.125, 1.0)
NAN = Agreement(math.inf, 0.5, math.inf, 1.0, finite=False)


def result(name: str, agreement: Agreement, **more) -> CaseResult:
    comparisons = [
        Comparison("torch_attn triton", ORACLE, "out", agreement),
        Comparison("torch_attn triton", "pallas_attn triton", "out", GOOD),
    ]
    runs = [RunRecord("torch_attn triton", 1.5, "triton (interpreter, cpu): asked for")]
    return CaseResult(name, asdict(FlashCase(name)), 2.0, runs, comparisons, **more)


def report(*cases: CaseResult) -> Report:
    return Report({"device": "a <card>"}, len(cases), list(cases))


MIXED = report(result("good", GOOD), result("bad", BAD), result("nan", NAN))


def test_json_is_strict_and_says_what_failed():
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    document = json.loads(MIXED.to_json(), parse_constant=refuse)
    assert document["schema_version"] == 1
    assert document["status"] == "failed"
    assert [case["status"] for case in document["cases"]] == ["passed", "failed", "failed"]
    bad = document["cases"][1]["comparisons"][0]
    assert (bad["max_error"], bad["max_budget"], bad["ratio"]) == (0.75, 0.5, 1.5)
    assert document["cases"][2]["comparisons"][0]["ratio"] is None


def test_the_page_needs_nothing_from_elsewhere():
    page = to_page(MIXED)
    links = re.findall(r"""(?:src|href|xlink:href)\s*=\s*["']?([^"'\s>]+)""", page)
    assert all(link.startswith("#") for link in links)
    assert not re.search(r"@import|<link|<iframe|<img|fetch\(", page)


def test_the_page_lists_failures_first():
    page = to_page(MIXED)
    table = page[page.index("<h2>Every comparison") :]
    rows = re.findall(r'<tr class="\w+"><td>(\w+)<td>out<td>(.*?)<td>float64', table)
    assert [name for name, _ in rows] == ["nan", "bad", "good"]
    cases = page[page.index("<h2>Cases") : page.index("<h2>Every comparison")]
    assert re.findall(r'<tr class="(\w+)"', cases) == ["failed", "failed", "passed"]
    assert page.index("<h2>Failures (2)</h2>") < page.index("<table")


@pytest.mark.parametrize(
    ("change", "ok"),
    [
        ({}, True),
        ({"error": "ValueError: no"}, False),
        ({"runs": [RunRecord("x", error="no")]}, False),
    ],
)
def test_an_error_anywhere_fails_the_case(change, ok):
    assert replace(result("good", GOOD), **change).ok is ok


def test_the_matrix_has_every_family_in_every_framework():
    ours, theirs = "pallas_attn gluon sm90", "torch_attn gluon sm90"
    equal = replace(GOOD, max_error=0.0, rmse=0.0)
    comparisons = [
        *(Comparison(subject, ORACLE, "out", GOOD) for subject in (ours, theirs)),
        Comparison(ours, theirs, "out", equal),
        Comparison(ours, theirs, "dq", GOOD),
    ]
    runs = [RunRecord(ours, 1.5, "gluon"), RunRecord(theirs, error="ValueError: no")]
    case = CaseResult("case", asdict(FlashCase("case")), 2.0, runs, comparisons)
    page = to_page(report(case))
    matrix = page.partition("Every kernel in every framework</h2>")[2].partition("<h2>")[0]
    assert f">{ours} (torch_attn)" in matrix
    assert f"same bits: {ours} and {theirs}" in matrix or f"{theirs} and {ours}" in matrix
    cells = re.findall(r"<td[^>]*>([^<]*)", matrix)
    assert cells[0].strip() == "flash_attention"
    assert [cell.strip() for cell in cells[1:4]] == ["1 of 1, 0.50", "0 of 1, 0.50", "1 of 2"]


def test_the_matrix_has_a_row_for_each_option():
    cases = [FlashCase("plain"), FlashCase("bias", bias="", sinks=True), DecodeCase("decode", (9,))]
    subject = "torch_attn triton sm80"
    results = [
        CaseResult(case.name, asdict(case), 2.0, [RunRecord(subject, 1.5, "triton")],
                   [Comparison(subject, ORACLE, "out", GOOD)])
        for case in cases
    ]  # fmt: skip
    matrix = to_page(report(*results)).partition("in every framework</h2>")[2]
    cells = re.findall(r"<td[^>]*>([^<]*)", matrix.partition("<h2>")[0])
    rows = dict(zip(map(str.strip, cells[::2]), map(str.strip, cells[1::2]), strict=True))
    one = dict.fromkeys(("bias", "sinks", "wide terms"), "1 of 1, 0.50")
    of_flash = {f"flash_attention, {x}": y for x, y in ({"bfloat16": "2 of 2, 0.50"} | one).items()}
    decode = [f"paged_decode{x}" for x in ("", ", bfloat16", ", GQA", ", Sq != Skv")]
    want = {"flash_attention": "2 of 2, 0.50"} | of_flash | dict.fromkeys(decode, "1 of 1, 0.50")
    assert rows == want


def test_the_matrix_says_what_a_library_refuses_or_does_not_claim():
    runs = [RunRecord("FA2", refused="No available kernel"), RunRecord("flax", 1.0, "flax 1")]
    results = [CaseResult("a", asdict(FlashCase("a")), 1.0, runs, []),
               CaseResult("b", asdict(FlashCase("b", sinks=True)), 1.0, runs[1:], [])]  # fmt: skip
    page = to_page(report(*results))
    assert "refuses 1 of 1" in page
    assert "not claimed" in page


def test_the_table_counts_failures_and_the_worst_of_each_output(tmp_path):
    runs = [RunRecord("FA2", 1.0)]
    wrong = [
        Comparison("FA2, first", ORACLE, "lse", BAD),
        Comparison("FA2, first", ORACLE, "out", GOOD),
    ]
    cases = [CaseResult(x, asdict(FlashCase(x)), 1.0, runs, wrong[n:]) for n, x in enumerate("ab")]
    cases.append(CaseResult("c", cases[0].problem, 1.0, [RunRecord("FA2", refused="no")], []))
    write_table(report(*map(without_rounds, cases)), tmp_path)
    table = (tmp_path / "conformance.md").read_text()
    assert "| *lse* | 0 of 1, 1.50, refuses 1 |" in table
    assert "| *out* | 2 of 2, 0.50, refuses 1 |" in table
    assert "| bfloat16 | 1 of 2, 1.50, refuses 1 |" in table
    assert "FA2: lse against float64: max error 0.75" in table


def test_the_page_has_the_line_that_repeats_a_failure():
    line = "python -m twin_attention.interop.parity --problem x"
    assert line in to_page(report(replace(result("a", replace(GOOD, each=2.0)), line=line)))


@pytest.mark.parametrize("suite", ["full", "large"])
def test_every_case_has_a_function_and_a_line(suite):
    names = {
        "FlashCase": "flash_attention", "VarlenCase": "flash_attention_varlen",
        "BlockSparseCase": "block_sparse_attention", "DilatedCase": "dilated_attention",
        "ContextCase": "context_attention",
        "DecodeCase": "paged_decode", "PagedCase": "paged_attention", "AppendCase": "append_kv",
        "MergeCase": "merge_states",
    }  # fmt: skip
    for case in (case for cases in KINDS for case in cases(suite)):
        assert function_of(asdict(case)) == names[type(case).__name__], case
        assert case.dtype in problem_text(asdict(case)), case
