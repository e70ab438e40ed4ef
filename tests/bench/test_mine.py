import getpass
import gzip
import json
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import __main__ as command
from bench import journal, measure, mine, peaks, timing
from bench.anonymous import clean
from bench.job import Call, Entry, Job
from bench.records import Times, load
from bench.timing import Timing
from tests.bench.conftest import raises
from twin_attention.interop.parity import environment
from twin_attention.interop.parity.subjects.absent import Absent

UUID = "GPU-01234567-89ab-cdef-0123-456789abcdef"
CARD = {"multiprocessors": 108, "memory_gib": 79.2, "shared_memory": 166912, "watts": 400.0,
        "sm_mhz": 1410, "memory_mhz": 1593, "driver": "580.65.06"}  # fmt: skip
FACTS = {"device": "NVIDIA A100-SXM4-80GB (compute capability 8.0)", "commit": "0123456789ab",
         "date": "2026-11-25T06:59:31+00:00", "torch": "2.11.0", "jax": "0.11.2"}  # fmt: skip


def timer(calls, *_):
    times = {s: Times(*[1.0 if s.target else 2.0] * 3) for s in calls}
    return {s: Timing(t, t, t, ("kernel",)) for s, t in times.items()}


def job(name, operation="forward", **factories):
    def made(tensors):
        return Call(lambda: "out", None)

    subjects = [Entry("torch gluon", "sm80"), Entry("jax mosaic", "sm80"), Entry("FA2")]
    factories = {s: factories.get(s.implementation.replace(" ", "_"), made) for s in subjects}
    return Job({"name": name}, operation, 10**12, 10**9, lambda: None, factories)


@pytest.fixture
def card(monkeypatch):
    suites = {part.suite: [job(f"{part.suite} problem")] for part in mine.PARTS}
    monkeypatch.setattr(environment, "choose_device", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(measure, "facts", lambda device: FACTS)
    monkeypatch.setattr(measure, "card", lambda: CARD)
    monkeypatch.setattr(measure, "nvml_reader", lambda: None)
    monkeypatch.setattr(timing, "time_calls", timer)
    monkeypatch.setattr(timing, "wait_for", lambda result: None)
    monkeypatch.setattr(peaks, "peak_jobs", list)
    monkeypatch.setattr(mine, "load", lambda name: SimpleNamespace(jobs=lambda _: suites[name]))
    parts = [part._replace(cases=None) for part in mine.PARTS]
    monkeypatch.setattr(mine, "PARTS", parts)
    return suites


def run(tmp_path):
    code = command.main(["mine", "--output", str(tmp_path)])
    return code, load(tmp_path / "mine-nvidia-a100-sxm4-80gb-0123456789ab.jsonl.gz")


def test_the_file_holds_card_clocks_versions_and_commit(card, tmp_path, capsys):
    code, records = run(tmp_path)
    assert code == 0
    assert [record.case["name"] for record in records[::3]] == [
        "flash problem", "kvcache problem", "packed problem",
    ]  # fmt: skip
    for record in records:
        assert (record.status, record.card, record.device) == ("ok", CARD, FACTS["device"])
        assert (record.commit, record.versions["jax"]) == ("0123456789ab", "0.11.2")
    printed = " ".join(capsys.readouterr().out.split())
    assert "108 SMs, 79 GiB, 166912 bytes of shared memory a block, up to 1410 MHz" in printed
    assert "power limit 400 W, driver 580.65.06" in printed
    assert printed.count("2.00") == 6  # of both frameworks
    assert "attach the file" in printed


def test_the_file_holds_nothing_personal(card, tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu17.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "jo")
    monkeypatch.setattr(Path, "home", lambda: Path("/home/jo"))
    personal = f"at 10.1.2.3 gpu17, of jo: /home/jo/x/lib.so, ~/x/y, 0000:65:00.0, {UUID}"
    error = OSError(f"{personal} {tmp_path}")
    card["flash"] = [job("flash problem", torch_gluon=raises(error), FA2=raises(Absent(personal)))]
    monkeypatch.setattr(measure, "facts", lambda device: FACTS | {"peer": "1.0+/home/jo/peer"})
    _, records = run(tmp_path)
    messages = [record.message for record in records if record.message]
    expected = "at [number] [name], of [name]: [path], [path], [number], [number]"
    assert messages == [f"OSError: {expected} [path]", expected]
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    assert (content[3], content[4:8]) == (0, bytes(4))  # no name of a file, no time
    text = gzip.decompress(content).decode()
    for word in ("gpu17", "jo", "home", "10.1", "65:00", UUID[4:], tmp_path.name):
        assert f'"{word}' not in text
        assert word not in text.replace("jobs", "")
    fields = set(json.loads(text.splitlines()[0]))
    assert not [name for name in fields if "host" in name and name != "host"]


@pytest.mark.parametrize(
    "text",
    ["8.0", "2.11.0+cu130", "a/b of 3/4", "0123456789ab with local changes", "12:30:45",
     "gave 1.5 times, 32x512", "FlashConfig(block_q=64)"],
)  # fmt: skip
def test_what_is_not_personal_stays(text):
    assert clean(text) == text


def test_what_does_not_fit_into_the_time_is_skipped_and_said(card, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(journal.STARTED, str(time.monotonic() - 210))
    code, records = run(tmp_path)
    assert code == 0
    found = {record.case["name"].split()[0]: record.status for record in records}
    assert found == {"flash": "skipped", "kvcache": "ok", "packed": "ok"}
    printed = capsys.readouterr().out
    assert "flash problem forward: skipped, the time is up" in printed
    assert "Skipped, as the time was up: flash problem" in printed


def test_after_a_crash_it_goes_on_with_what_was_measured(card, tmp_path, monkeypatch):
    monkeypatch.setenv(journal.VARIABLE, str(tmp_path / "journal"))
    _, first = run(tmp_path)
    card["packed"].append(job("another"))
    _, second = run(tmp_path)  # another process of this run
    assert len(second) == len(first) + 3


@pytest.mark.parametrize("target", ["sm80", "sm90"])
@pytest.mark.parametrize("part", mine.PARTS, ids=lambda part: part.suite)
def test_its_problems_are_those_of_the_suites_beside_the_peers(part, target):
    jobs = mine.chosen(part, target)
    names = list(dict.fromkeys(job.case["name"] for job in jobs))
    assert names == list(part.cases or names)
    for job in jobs:
        found = {subject.implementation for subject in job.factories}
        assert {"torch triton", "jax triton"} <= found <= mine.NAMES
        assert [name for name in found if name.startswith("FA2")]
        assert [name for name in found if name.startswith("cuDNN")]
        assert {subject.target for subject in job.factories} == {target, None}
    operations = {job.operation for job in jobs}
    assert operations == ({"decode"} if part.suite == "kvcache" else {"forward", "backward"})
