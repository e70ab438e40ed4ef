import os
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from bench import __main__ as command
from bench import measure as measuring
from bench.job import Entry, Job
from bench.records import append
from bench.registry import SUITES
from bench.suites import command as suites
from twin_attention.interop.parity import arguments as checks
from twin_attention.interop.parity import environment

FACTS = {"device": "GPU", "commit": "abc", "date": "2026-11-21T06:59:31+00:00", "torch": "2.0"}


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(environment, "choose_device", lambda: "cuda")
    monkeypatch.setattr(environment, "choose_targets", lambda device, target: ("sm90", "sm80"))
    monkeypatch.setattr(measuring, "facts", lambda device: FACTS)
    monkeypatch.setattr(measuring, "card", lambda: None)
    monkeypatch.setattr(measuring, "nvml_reader", lambda: None)


def suite(jobs):
    return SimpleNamespace(jobs=lambda targets: jobs)


def job(*names):
    factories = {Entry(name, "sm90"): pytest.fail for name in names}
    return Job({"name": "case"}, "forward", 0, 0, lambda: None, factories)


@pytest.mark.parametrize("name", [*SUITES, "all"])
def test_without_a_gpu_it_says_so(monkeypatch, capsys, name):
    monkeypatch.setattr(environment, "choose_device", lambda: "cpu")
    with pytest.raises(SystemExit) as exit:
        command.main([name])
    assert exit.value.code == 2
    message = "expected a CUDA GPU that torch and JAX both see, found none"
    assert capsys.readouterr().err.endswith(f"python -m bench {name}: error: {message}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["flash", "--resume"], "--resume: expected --json FILE beside it, got none"),
        (["flash", "--filter", "zz"], "--filter: expected part of a case's name, got 'zz'"),
        (["all", "--filter", "zz"], "--filter: expected part of a case's name, got 'zz'"),
        (["fa2", "--memory-cap", "81"], "--memory-cap: expected up to the GPU's 80 GiB, got 81"),
        (["fa2", "--memory-cap", "0"], "--memory-cap: expected more than 0 GiB, got 0"),
        (["fa2", "--json", "a.gz"], "--json: expected a plain file to append to, got 'a.gz'"),
        (["fa2", "--json", "/proc/x/y"],
         "--json: expected a folder that can be made, got '/proc/x'"),
        (["fa2", "--only", "zz", "FA9"],
         "--only: expected part of an implementation's name, got 'zz', 'FA9'"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_it_refuses(gpu, monkeypatch, capsys, arguments, message):
    _card(monkeypatch)
    if "81" not in arguments:  # wrong on any card, and named before one is looked for
        monkeypatch.setattr(environment, "choose_device", lambda: pytest.fail("looked for a GPU"))
    _refused(capsys, arguments, message)


BOTH = ("forward", "both")
DRAFTS = "heads-32-8-64-tokens"


@pytest.mark.parametrize(
    ("arguments", "titles"),
    [
        (["tree", "--filter", "documents"], [f"documents-16x1024-d128 {x}" for x in BOTH]),
        (["tree", "--filter", "16x1024-d64 both"], ["tree-8192-16x1024-d64 both"]),
        (["kvcache", "--filter", "cascade"],
         [f"cascade-64x{x}-pages decode" for x in (
             "8704-heads-32-8-512", "8704-heads-32-8-0", "1024-heads-32-8-0")]),
        (["kvcache", "--filter", "64-tokens"],
         [f"{x}-{DRAFTS}{y} decode" for x in ("1x32768", "64x8192") for y in ("", "-drafts")]),
    ],
)  # fmt: skip
def test_a_filter_leaves_cases_and_passes(gpu, monkeypatch, arguments, titles):
    _card(monkeypatch)
    measured = []
    monkeypatch.setattr(suites, "measure", lambda name, jobs, *_: measured.extend(jobs) or 0)
    assert command.main(arguments) == 0
    assert [job.title for job in measured] == titles


def _refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit:
        command.main(arguments)
    assert exit.value.code == 2
    assert f"error: {message}" in capsys.readouterr().err


def test_resuming_from_a_file_with_a_broken_line_is_refused(gpu, tmp_path, capsys, record):
    path = tmp_path / "records.jsonl"
    append(path, [record()])
    path.write_text("{}\n" + path.read_text())
    _refused(capsys, ["flash", "--json", str(path), "--resume"], f"--resume: {path}:1: expected")


def test_a_missing_package_names_the_extra(monkeypatch, capsys):
    absent, real = {"rich", "torch"}, checks.find_spec
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name in absent else real(name))
    install = "missing: in a checkout of twin-attention, pip install '.[parity]'"
    _refused(capsys, ["report", "records.jsonl"], f"rich {install}")
    absent.remove("rich")
    _refused(capsys, ["fa2"], f"torch {install}")
    assert command.main(["report", "no.jsonl"]) == 2
    assert "no.jsonl" in capsys.readouterr().err  # it needs no framework


def _card(monkeypatch):
    """A card of 80 GiB; return what torch is told to take of it."""
    taken = []
    properties = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", taken.append)
    return taken


def test_a_memory_cap_holds_both_frameworks(gpu, monkeypatch):
    taken = _card(monkeypatch)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.8")  # so that it is put back

    def run_suite(jobs, origin, instruments, *rest):
        assert taken == []
        with suppress(MemoryError), instruments.limit():
            assert taken == [0.25]
            raise MemoryError
        return 0

    monkeypatch.setattr(suites, "load", lambda name: suite([job("torch triton")]))
    monkeypatch.setattr(measuring, "run_suite", run_suite)
    assert command.main(["flash", "--memory-cap", "20"]) == 0
    assert taken == [0.25, 1.0]
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.25"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ


def test_a_suite_runs_after_the_peaks_of_the_device(gpu, monkeypatch, tmp_path, capsys):
    called = []

    def run_suite(jobs, origin, instruments, console, path, resume, *rest):
        called.append((jobs, origin, path, resume))
        return 130

    found = [job("torch triton", "jax triton", "FA2"), job("torch triton")]
    monkeypatch.setattr(suites, "load", lambda name: suite(found))
    monkeypatch.setattr(measuring, "run_suite", run_suite)
    path = tmp_path / "records.jsonl"
    options = ["--json", str(path), "--resume", "--only", "jax", "FA2"]
    assert command.main(["eager", *options]) == 130
    ((jobs, origin, *rest),) = called
    assert [job.case["name"] for job in jobs] == ["matmul", "read", "copy", "case"]
    assert list(jobs[-1].factories) == [Entry("jax triton", "sm90"), Entry("FA2", "sm90")]
    assert origin["suite"] == "eager"
    assert rest == [path, True]
    assert SUITES["eager"].title in capsys.readouterr().out


@pytest.fixture
def measured(monkeypatch, record):
    done = SimpleNamespace(names=[], codes={})

    def measure(name, jobs, setting):
        append(setting.path, [record()])
        done.names.append(name)
        return done.codes.get(name, 0)

    monkeypatch.setattr(suites, "measure", measure)
    return done


def test_all_runs_every_suite_and_reports(gpu, measured, tmp_path):
    path = tmp_path / "bench.jsonl"
    assert command.main(["all", "--json", str(path)]) == 0
    assert measured.names == list(SUITES)
    assert {"bench.md", "bench.html", "bench.csv"} <= {file.name for file in tmp_path.iterdir()}


def test_ctrl_c_ends_all_and_what_is_measured_is_reported(gpu, measured, tmp_path):
    measured.codes["kvcache"] = 130
    assert command.main(["all", "--json", str(tmp_path / "bench.jsonl")]) == 130
    assert measured.names == ["flash", "kvcache"]
    assert (tmp_path / "bench.md").exists()
