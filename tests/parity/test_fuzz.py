from __future__ import annotations

import os
import signal
import time
from dataclasses import asdict, replace

import pytest
import torch

from twin_attention.interop.parity import __main__ as command
from twin_attention.interop.parity import sides
from twin_attention.interop.parity.cases import DecodeCase, FlashCase, VarlenCase
from twin_attention.interop.parity.check import NAN
from twin_attention.interop.parity.fuzz import trial
from twin_attention.interop.parity.fuzz.memory import (
    Guard,
    lay_out,
    saved_as,
    unchanged,
    with_odd_strides,
)
from twin_attention.interop.parity.fuzz.problems import (
    HIDING,
    HOOKS,
    KINDS,
    VARIANTS,
    Problem,
    Rows,
    draw,
    hidden_values,
    tile_sizes,
)
from twin_attention.interop.parity.fuzz.shrink import shrink
from twin_attention.interop.parity.fuzz.trial import run_problem
from twin_attention.interop.parity.records import (
    ORACLE,
    CaseResult,
    Comparison,
    RunRecord,
    failures_of,
)
from twin_attention.interop.parity.sides import Ours
from twin_attention.interop.parity.workers import run_cases, tell

LONGEST = 40
TORCH = Ours("torch_attn", "triton")


def test_problems_are_valid_differ_and_come_back_from_their_lines():
    problems = [draw(5, index, LONGEST) for index in range(400)]
    assert {type(problem.case) for problem in problems} == set(KINDS.values())
    lines = [problem.to_line() for problem in problems]
    assert len(set(lines)) == len(lines)
    for problem, line in zip(problems, lines, strict=True):
        assert problem.case.spec.dtype == problem.case.dtype
        assert Problem.of_line(line) == problem
    assert draw(5, 7, LONGEST) == problems[7] != draw(6, 7, LONGEST)


def test_problems_of_a_group_share_kernels():
    for first in range(0, 200, VARIANTS):
        group = [draw(3, first + i, LONGEST) for i in range(VARIANTS)]
        assert [problem.jax for problem in group] == [True] + [False] * (VARIANTS - 1)
        shared = ("dtype", "head_dim", "head_dim_v", "heads_q", "heads_kv", "causal", "sinks")
        for name in shared:
            assert len({getattr(problem.case, name, None) for problem in group}) == 1


def test_problems_meet_edges_and_what_callers_do():
    """A tile's edge, one less and one more; pages, tables and windows likewise."""
    problems = [draw(6, index, 200) for index in range(1500)]
    found = {
        "queries": {getattr(x.case, "seq_q", None) for x in problems},
        "table": {getattr(x.case, "relative", None) for x in problems},
        "window": {side for x in problems for side in getattr(x.case, "window_size", ()) or ()},
    }
    assert tile_sizes() == (16, 32, 64, 128, 192)
    for name, sizes in found.items():
        for tile in tile_sizes()[1 if name == "table" else 0 :]:
            missing = {tile - 1, tile, tile + 1} - sizes
            assert len(missing) < 3, (name, missing)
    assert {63, 64, 65, 127, 128, 129} <= found["queries"]
    pages = [
        (n - x.case.page_size * (n // x.case.page_size), x.case.page_size)
        for x in problems
        if isinstance(x.case, DecodeCase)
        for n in x.case.lengths
        if n > x.case.page_size > 9
    ]
    assert {0, 1, -1} <= {rest if rest < 2 else rest - size for rest, size in pages}
    assert {x.hiding for x in problems} == {None, *HIDING}
    assert {name for x in problems for name in x.constants} >= {"q", "k", "v", "sinks", "bias"}
    assert 100 < sum(x.odd_strides for x in problems) < 900


@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_that_hide_keys_fit_their_dtype(dtype, hiding):
    problem = Problem(FlashCase("hiding"), hiding=hiding)
    bias, table, slopes = (torch.zeros(size, dtype=dtype) for size in ((2, 1, 8, 40), (2, 9), (4,)))
    least = max(hiding, torch.finfo(dtype).min) if hiding > -torch.inf else hiding
    got = hidden_values("bias", bias, problem)
    assert set(got.flatten().tolist()) <= {0.0, torch.tensor(least, dtype=dtype).item()}
    whole = (got == got.min()).all(-1)
    assert hiding == 0 or (whole.any() and not whole.all())
    assert hidden_values("relative_bias", table, problem).dtype == dtype
    assert hidden_values("alibi_slopes", slopes.float(), problem).isfinite().all()


def test_dimensions_of_size_1_have_odd_strides():
    x = torch.randn(1, 5, 1, 4)
    odd = with_odd_strides(x)
    assert torch.equal(odd, x)
    assert odd.stride() == (3, 4, 7, 1)


@pytest.mark.parametrize(
    "line", ["", "{}", '{"kind": "?"}', '{"kind": "MergeCase", "case": {"x": 1}}']
)
def test_a_line_that_is_no_problem_is_refused(line):
    with pytest.raises(ValueError, match="expected a problem as a failure prints it"):
        Problem.of_line(line)


@pytest.mark.parametrize("rows", [Rows(), Rows(True, 3, 1), Rows(False, 16, 8), Rows(True)])
def test_a_layout_has_the_values_and_nan_around_them(rows):
    x = torch.randn(2, 5, 3, 16)
    laid_out = lay_out(x, rows)
    torch.testing.assert_close(laid_out, x, rtol=0, atol=0)
    assert laid_out.stride(-1) == 1
    assert laid_out.storage_offset() == rows.offset
    assert laid_out.stride(-3) == (16 + rows.gap if rows.heads_first else 3 * (16 + rows.gap))
    storage = torch.empty(0).set_(laid_out.untyped_storage())
    assert storage.isnan().sum() == rows.offset + 30 * rows.gap


@pytest.mark.parametrize("place", [-1, 64])
def test_a_write_beside_a_buffer_is_found(place):
    with Guard() as guard:
        x = torch.empty(8, 8)
        assert x.isnan().all()
    guard.check()
    torch.as_strided(x, (1,), (1,), x.storage_offset() + place).fill_(0.0)
    with pytest.raises(MemoryError, match="memory around"):
        guard.check()


def test_a_write_into_the_gap_of_an_operand_is_found():
    tensors = {"q": lay_out(torch.randn(1, 4, 2, 16), Rows(False, 4))}
    with unchanged(tensors):
        pass
    with pytest.raises(MemoryError, match=r"^q: written"), unchanged(tensors):
        torch.as_strided(tensors["q"], (1,), (1,), 17).fill_(1.0)


@pytest.mark.parametrize("hook", HOOKS)
def test_saved_tensors_come_back_with_their_values(hook):
    x = torch.randn(1, 4, 2, 16, requires_grad=True)
    with saved_as(hook):
        y = (x * x).sum()
    y.backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


SMALL = FlashCase("small", 1, 20, 30, 2, 1, 16, causal=True, scale=0.3)


def test_a_right_problem_passes_in_every_layout():
    problem = Problem(SMALL, {"q": Rows(True, 1, 1), "dout": Rows(True)}, 3.0, hook="unaligned")
    result = run_problem(problem, [[TORCH, Ours("pallas_attn", "triton")]], "cpu")
    assert result.ok, result
    assert {c.subject for c in result.comparisons} == {
        "torch_attn triton, guarded",
        "torch_attn triton, again",
        "pallas_attn triton, first",
    }


@pytest.mark.parametrize("hook", HOOKS)
def test_gradients_are_right_however_saved_tensors_come_back(hook):
    problem = Problem(replace(SMALL, batch=3, heads_q=4, heads_kv=2), hook=hook, jax=False)
    result = run_problem(problem, [[TORCH]], "cpu")
    assert result.ok, result


@pytest.mark.parametrize("side", ["torch_attn", "pallas_attn"])
def test_no_gradient_is_asked_for_constants(side):
    case = replace(SMALL, sinks=True)
    problem = Problem(case, constants=("q", "sinks"), hook="contiguous")
    result = run_problem(problem, [[Ours(side, "triton")]], "cpu")
    assert result.ok, result
    assert {c.output for c in result.comparisons} == {"out", "lse", "dk", "dv"}


@pytest.mark.parametrize("jax", [True, False])
def test_what_jax_compiles_runs_one_problem_of_a_group(jax, monkeypatch):
    ran = []
    monkeypatch.setattr(Ours, "supports", lambda *_: None)
    monkeypatch.setattr(trial, "_values", lambda *_: None)
    monkeypatch.setattr(
        trial, "_run_subject", lambda subject, *_: ran.append(subject.label) or (None, [])
    )
    names = ("torch_attn triton", "pallas_attn mosaic", "pallas_attn torch_triton")
    group = [Ours(*name.split(), "sm90") for name in names]
    assert run_problem(Problem(FlashCase("x"), jax=jax), [group], "cpu").ok
    assert ran == [x.label for x in (group if jax else group[:1])]


@pytest.mark.parametrize(("rows", "ok"), [({"q": Rows(offset=1)}, True), ({}, False)])
def test_only_unaligned_rows_may_be_refused(rows, ok, monkeypatch):
    def refuse(*arguments):
        raise NotImplementedError("implementation: expected rows that TMA loads")

    monkeypatch.setattr(sides, "call", refuse)
    assert run_problem(Problem(SMALL, rows), [[TORCH]], "cpu").ok == ok


def test_a_wrong_element_is_found(monkeypatch):
    def call(*arguments):
        results = right(*arguments)
        results["dk"].view(-1)[3] += 1.0
        return results

    right = sides.call
    monkeypatch.setattr(sides, "call", call)
    result = run_problem(Problem(SMALL), [[TORCH]], "cpu")
    assert failures_of(result) == {("torch_attn triton", "wrong")}


def result_of(problem: Problem, error: str | None = None) -> CaseResult:
    runs = [RunRecord("torch_attn triton", error=error)]
    return CaseResult(problem.name, asdict(problem.case), 0.0, runs)


def fails_when_long(problem: Problem) -> CaseResult:
    case = problem.case
    longest = max(n for _, n in case.lengths)
    result = result_of(problem)
    if longest >= 13 and case.heads_kv >= 2 and case.causal:
        # Wrong numbers: after an exception the next problem would have a new process.
        result.comparisons.append(Comparison("torch_attn triton, first", ORACLE, "out", NAN))
    return result


def hangs_or_dies(problem: Problem) -> CaseResult:
    tell("torch_attn gluon sm90, again")
    if problem.name == "hangs":
        time.sleep(600)
    if problem.name == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    return result_of(problem)


@pytest.mark.usefixtures("forked_workers")
def test_a_problem_is_shrunk_to_the_smallest_that_fails_alike():
    case = VarlenCase(
        "", ((4, 9), (30, 77), (5, 5)), (3, 4), 12, 4, 64, 32, softcap=2.0, sinks=True
    )
    problem = Problem(case, {"q": Rows(True, 1, 1)}, 3.0, "unaligned")
    failures = failures_of(fails_when_long(problem))
    smallest = shrink(problem, failures, fails_when_long, 60.0, 200.0)
    (length,), heads_kv = smallest.case.lengths, smallest.case.heads_kv
    assert (max(length), min(length), heads_kv, smallest.case.head_dim) == (13, 1, 2, 16)
    assert (smallest.case.softcap, smallest.case.sinks) == (None, False)
    assert (smallest.rows, smallest.hook, smallest.spread) == ({}, "", 1.0)


@pytest.mark.usefixtures("forked_workers")
def test_a_hang_and_a_death_are_named_and_the_others_go_on():
    problems = [
        Problem(replace(SMALL, name=name)) for name in ("hangs", "dies", "ends", "ends too")
    ]
    started = time.monotonic()
    results = {x.name: x for x in run_cases(problems, hangs_or_dies, 2, lambda name: None, 3.0)}
    assert time.monotonic() - started < 300
    assert results["ends"].ok
    assert results["ends too"].ok
    where = "in torch_attn gluon sm90, again"
    assert results["hangs"].error == f"hung: no result after 3 seconds, {where}"
    assert results["dies"].error == f"worker process died: SIGSEGV, {where}"
    assert failures_of(results["hangs"]) == {("torch_attn gluon sm90", "hung")}
    assert failures_of(results["dies"]) == {("torch_attn gluon sm90", "worker process died")}


@pytest.mark.usefixtures("forked_workers")
def test_the_command_counts_what_ran(tmp_path, capsys):
    arguments = ["--fuzz", "1", "--seed", "4", "--jobs", "1", "--implementations", "reference"]
    assert command.main([*arguments, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "seed 4, 1 seconds in 1 processes" in printed
    assert "problems, 0 failed" in printed


def test_schedules_that_a_family_lacks_run_by_default(monkeypatch):
    ran, call = [], sides.call

    def noted(side, case, inputs, implementation, *rest):
        ran.append((type(case), implementation))
        return call(side, case, inputs, implementation, *rest)

    def supports(self, case):
        return None if isinstance(case, VarlenCase) else "packed sequences only"

    monkeypatch.setattr(sides, "call", noted)
    monkeypatch.setattr(Ours, "supports", supports)
    case = VarlenCase("x", ((9, 9), (3, 5)), head_dim=16, causal=False, batch_invariant=True)
    assert run_problem(Problem(case), [[TORCH]], "cpu").ok
    assert {(VarlenCase, "triton"), (FlashCase, None)} <= {*ran}
    assert (FlashCase, "triton") not in ran
