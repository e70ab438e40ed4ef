import json
import re
from pathlib import Path

import pytest

from twin_attention.interop.parity import __main__ as command
from twin_attention.interop.parity.records import ORACLE
from twin_attention.interop.parity.subjects.choose import choose_subjects
from twin_attention.interop.parity.suites.kinds import KINDS

OUTPUTS = ("out", "lse", "dq", "dk", "dv")


def parity(folder: Path, *arguments: str) -> int:
    return command.main(["--suite", "small", *arguments, "--output", str(folder)])


def verdicts(folder: Path) -> dict[str, dict]:
    document = json.loads((folder / "parity.json").read_text())
    return {case["name"]: case for case in document["cases"]}


def failed(case: dict) -> set[tuple[str, str, str]]:
    return {
        (c["subject"], c["against"], c["output"])
        for c in case["comparisons"]
        if c["status"] == "failed"
    }


def test_right_results_pass(fake_twins, tmp_path, capsys):
    assert parity(tmp_path, "--filter", "e-") == 0
    cases = verdicts(tmp_path)
    chosen = [case for cases in KINDS for case in cases("small", "e-")]
    assert list(cases) == [case.name for case in chosen]
    assert {case["status"] for case in cases.values()} == {"passed"}
    printed = capsys.readouterr().out
    assert "triton (interpreter, a fake device): a test asked for it" in printed
    assert f"{len(cases)} passed, 0 failed" in printed


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_wrong_element_fails_and_is_named(fake_twins, tmp_path, capsys, output):
    def spoil(subject, case, results):
        if case.name == "fp32-causal" and subject.side == "pallas_attn":
            results[output].view(-1)[-1] += 1.0

    fake_twins(spoil)
    assert parity(tmp_path, "--filter", "fp32-causal", "tf32-causal") == 1
    cases = verdicts(tmp_path)
    assert {name for name, case in cases.items() if case["status"] == "failed"} == {"fp32-causal"}
    us, them = "pallas_attn triton", "torch_attn triton"
    assert failed(cases["fp32-causal"]) == {(us, ORACLE, output), (them, us, output)}
    printed = capsys.readouterr().out
    assert f"{us}: {output} against {ORACLE}: max error" in printed
    assert "1 failed" in printed
    page = (tmp_path / "parity.html").read_text()
    assert "<h2>Failures (1)</h2>" in page
    assert f"{us}: {output} against {ORACLE}" in page


def test_an_exception_fails_its_case_alone(fake_twins, tmp_path, capsys):
    def spoil(subject, case, results):
        if case.name == "mqa-d128" and subject.side == "torch_attn":
            raise RuntimeError("\x1b[91mout of\x1b[0m\n/lib/site-packages/registers <and> luck")

    fake_twins(spoil)
    assert parity(tmp_path, "--filter", "q") == 1
    cases = verdicts(tmp_path)
    assert {name: case["status"] for name, case in cases.items()} == {
        "mqa-d128": "failed",
        "decode-no-sequence": "passed",
    }
    errors = {run["subject"]: run["error"] for run in cases["mqa-d128"]["runs"]}
    message = "RuntimeError: out of registers <and> luck"
    assert errors == {"torch_attn triton": message, "pallas_attn triton": None}
    assert {c["subject"] for c in cases["mqa-d128"]["comparisons"]} == {"pallas_attn triton"}
    assert f"torch_attn triton: {message}" in capsys.readouterr().out
    assert "registers &lt;and&gt; luck" in (tmp_path / "parity.html").read_text()


def test_an_interrupt_reports_what_is_done(fake_twins, tmp_path, capsys):
    def spoil(subject, case, results):
        if case.name == "no-batch":
            raise KeyboardInterrupt

    fake_twins(spoil)
    assert parity(tmp_path, "--filter", "no-") == 130
    document = json.loads((tmp_path / "parity.json").read_text())
    assert [case["name"] for case in document["cases"]] == ["no-keys"]
    assert (document["planned"], document["complete"]) == (4, False)
    assert "1 passed, 0 failed, 3 not run (interrupted)" in capsys.readouterr().out


def test_a_report_keeps_the_order_of_the_cases(fake_twins, tmp_path, monkeypatch):
    def backwards(cases, run, jobs, begin):
        yield from map(run, reversed(cases))

    monkeypatch.setattr(command, "run_cases", backwards)
    assert parity(tmp_path, "--filter", "no-", "--jobs", "2") == 0
    names = ["no-keys", "no-batch", "decode-no-sequence", "merge-no-state"]
    assert list(verdicts(tmp_path)) == names


def test_list_names_the_chosen_cases_and_runs_nothing(tmp_path, capsys):
    assert parity(tmp_path, "--list", "--suite", "all", "--filter", "d128") == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    expected = [
        case.name for suite in ("full", "large") for kind in KINDS for case in kind(suite, "d128")
    ]
    assert names == expected
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--filter", "nothing like it"], "--filter: expected part of a case's name"),
        (["--suite", "huge"], "invalid choice: 'huge'"),
        (["--target", "sm80"], "target: expected None without a GPU"),
        (["--implementations", "cudnn"], "invalid choice: 'cudnn'"),
        (
            ["--implementations", "gluon"],
            "--implementations: expected one with kernels for this device, got 'gluon'",
        ),
        (["--subject", "cuDNN"], "--subject 'cuDNN': it needs a GPU"),
        (["--subject", "FA5"], "--subject: expected all or some of torch_attn triton"),
        (["--jobs", "x"], "--jobs: expected a number of 1 or more, got 'x'"),
        (["--jobs", "0"], "--jobs: expected a number of 1 or more, got '0'"),
    ],
)
def test_bad_arguments(fake_twins, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        parity(tmp_path, *arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("forked_workers")
def test_subjects_are_libraries_and_ours(tmp_path, capsys):
    names = ("FA2", "flax", "transformers sdpa", "torch_attn triton")
    every = {x.label for (x,) in choose_subjects(["all"], [], "cpu")}
    assert every > {*names[:3], "FlexAttention", "jax.nn XLA"}
    chosen = ("--filter", "one-token", "fp32-causal", "--jobs", "2")
    assert parity(tmp_path, *chosen, "--subject", *names) == 0
    cases = json.loads((tmp_path / "conformance.json").read_text())["cases"]
    ran = {(case["name"], run["subject"]) for case in cases for run in case["runs"]}
    subjects = {"FA2", "transformers sdpa", "torch_attn triton"}
    assert {("one-token", x) for x in subjects} | {("fp32-causal", "flax")} <= ran
    page = (tmp_path / "conformance.md").read_text()
    assert "| not claimed |" in page
    assert re.search(r"\*lse\* \|.* 1 of 1, 0\.\d\d", page)
    assert command.main(["--subjects"]) == 0
    assert "cuDNN                  it needs a GPU" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "outputs"), [("strided", 7), ("decode-fp8", 2)])
def test_the_reference_of_both_packages_passes(tmp_path, name, outputs):
    arguments = ("--implementations", "reference", "--filter", name)
    assert parity(tmp_path, *arguments) == 0
    case = verdicts(tmp_path)[name]
    titles = {(c["subject"], c["against"]) for c in case["comparisons"]}
    assert len(titles) == 3
    assert len(case["comparisons"]) == 3 * outputs
    assert all("reference (framework" in run["ran"] for run in case["runs"])
