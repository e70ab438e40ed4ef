import re
from dataclasses import replace

import pytest

from tests.tuning.conftest import FIT
from tuning.__main__ import main
from tuning.static import command
from tuning.static.gate import FEATURES, Problem, Verdict
from twin_attention.targets.kernels import DecodeConfig, FlashConfig, PreprocessConfig
from twin_attention.targets.target import TARGETS

FLASH = FlashConfig(block_q=128, block_kv=128, num_warps=8, num_stages=3)
CONFIGS = {
    "flash_bwd_preprocess": PreprocessConfig(block_q=128, num_warps=8),
    "paged_decode": DecodeConfig(max_rows=128, block_kv=128, num_warps=8, num_stages=3),
}


def verdict(kernel: str, feature: str, failures: tuple[str, ...] = (), **problem) -> Verdict:
    of = Problem(**{"framework": "torch", "target": "sm80", "dtype": "bfloat16", **problem},
                 feature=feature)  # fmt: skip
    config = CONFIGS.get(kernel, FLASH)
    return Verdict(of, kernel, config, FIT, failures)


@pytest.fixture
def select(monkeypatch):

    def run(*arguments, missing=lambda problem: None):
        selected = []
        monkeypatch.setattr(command, "_check_all", lambda chosen, *_: selected.extend(chosen) or [])
        monkeypatch.setattr(command, "not_compiled", missing)
        assert main(["static", *arguments]) == 1  # nothing was compiled
        return selected

    return run


@pytest.mark.parametrize("targets", [(), ("sm90",), ("sm80", "sm90")])
def test_targets(select, targets):
    selected = select(*(word for target in targets for word in ("--target", target)))
    assert {problem.target for problem in selected} == set(targets or ("sm80", "sm90"))


def test_one_problem_of_12_has_something_of_everything(select):
    all_of_them, some = select("--target", "sm80"), select("--target", "sm80", "--every", "12")
    assert len(all_of_them) / 12 <= len(some) < len(all_of_them) / 8
    for name in ("framework", "family", "dtype", "feature"):
        assert {getattr(x, name) for x in some} == {getattr(x, name) for x in all_of_them}


def test_targets_take_turns_in_the_features_that_both_have(select):
    first, second = ({x.feature for x in select("--target", x, "--alternate")} for x in TARGETS)
    assert first | second == {*FEATURES}
    assert not first & second
    both = [{x.feature for x in select("--target", x)} for x in TARGETS]
    shared = [x for x in FEATURES if all(x in features for features in both)]
    assert {*shared[::2]} <= first
    assert {*shared[1::2]} <= second


def test_a_card_with_less_shared_memory(select):
    found = select("--shared-memory", "99")
    assert {(problem.target, problem.shared_memory) for problem in found} == {("sm80", 99 * 1024)}
    assert len(set(found)) == len(found)
    plain = {replace(problem, shared_memory=None) for problem in select("--target", "sm80")}
    assert {replace(problem, shared_memory=None) for problem in found} == plain


def test_what_is_not_compiled_has_a_reason(select, capsys):
    reason = {"mosaic": "its kernels need jax 0.11"}
    selected = select("--target", "sm90", missing=lambda problem: reason.get(problem.family))
    assert "jax mosaic on sm90, not compiled: its kernels need jax 0.11" in capsys.readouterr().out
    assert {problem.family for problem in selected} == {"triton", "gluon"}


def test_explicit_kernels_begin_first(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    fit, begun = verdict("flash_fwd", "causal", head_dim=64), []

    def compile_nothing(function, selected, console):
        begun.extend(selected)
        return [[replace(fit, problem=x)] for x in selected]

    monkeypatch.setattr(command, "_in_processes", compile_nothing)
    features = (f"--feature={name}" for name in ("tree-depths", "causal", "decode"))
    arguments = ["--target=sm80", "--framework=torch", "--head-dim=64", "--dtype=bfloat16"]
    assert main(["static", *arguments, *features]) == 0
    assert [(x.family, x.feature) for x in begun] == [
        ("gluon", "causal"), ("gluon", "tree-depths"), ("triton", "causal"), ("triton", "decode"),
    ]  # fmt: skip
    rows = [line.split()[3] for line in capsys.readouterr().out.splitlines() if "8×3" in line]
    assert rows == ["causal", "decode", "causal", "tree-depths"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--head-dim", "13"],
         "--head-dim: expected one of 16, 32, 64, 80, 96, 128, 192, 240, 256, 320, 512, got 13"),
        (["--target", "sm90", "--shared-memory", "99"],
         "--shared-memory: expected --target sm80 beside it, got sm90"),
        (["--every", "x"], "--every: expected a number of 1 or more, got 'x'"),
        (["--dtype", "int8", "--feature", "causal"],
         "expected --feature, --dtype and --head-dim that some kernel has together, got none"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(command, "_check_all", lambda *_: pytest.fail("something was compiled"))
    with pytest.raises(SystemExit) as stop:
        main(["static", *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("failures", [(), ("spills 4 B of stores, 4 B of loads",)])
def test_what_is_said_of_failures(failures, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")  # no line of the table is broken
    fit = verdict("flash_fwd", "causal", head_dim=64)
    judged = replace(fit, failures=failures)
    monkeypatch.setattr(command, "_check_all", lambda *_: [fit, judged])
    assert main(["static", "--target", "sm80"]) == len(failures)
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if "causal" in line and "8×3" in line]
    assert [row[-1] for row in rows] == ["ok", "fails" if failures else "ok"]
    for failure in failures:
        assert f"flash_fwd torch sm80 bfloat16 64 causal triton: {failure}" in out
    assert re.search(rf"2 kernels compiled for sm80 in \d+ s, {len(failures)} failed", out)
