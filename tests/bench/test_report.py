import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench import __main__ as command
from bench.records import Times, append, load, stem
from bench.report.markdown import summary
from bench.report.page import to_page
from bench.report.sections import peaks_table, sections

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
COMMITTED = sorted(RESULTS.glob("*.jsonl.gz"), key=lambda path: path.name)


@pytest.fixture
def records(record):
    """Ours takes no time on the second length."""
    peer = {"implementation": "FA2", "target": None, "times": Times(3.0, 2.9, 3.2), "tflops": 66.7}
    failed = {"status": "out of memory", "message": "MemoryError: <b> | too large"}
    return [record(), record(**peer), record(keys=2048, **failed), record(keys=2048, **peer)]


def column(section, title: str) -> list[str]:
    titles, *rows = section.every
    return [row[titles.index(title)] for row in rows]


def test_every_row_has_its_share_of_the_limits_of_its_own_suite(record):
    peak = record(operation="peak", target=None, tflops=800.0)
    matmul = replace(peak, case={"name": "matmul"})
    other = replace(matmul, suite="fa2", tflops=400.0)
    h200 = [replace(r, device="NVIDIA H200") for r in (matmul, other, record())]
    (section,) = sections(h200)
    assert column(section, "of measured bf16 matmul") == ["12.5%"]  # 100 of 800
    assert column(section, "of datasheet") == ["10.1%"]  # 100 of 989
    assert peaks_table(h200) == [
        ["peak", "datasheet", "beside flash", "beside fa2"],
        ["matmul, TFLOP/s", "989", "800 (80.9%)", "400 (40.4%)"],
    ]
    (unknown,) = sections([record()])
    assert not {"of measured bf16 matmul", "of datasheet"} & set(unknown.every[0])


@pytest.mark.filterwarnings("error")
def test_the_page_needs_nothing_else_escapes_and_shows_statuses(record, records):
    wrong = record(implementation="FA9", target=None, status="refused by parity", message="no")
    absent = record(implementation="FA8", target=None, status="absent", message="no")
    timed = replace(records[0], kernels=("flash_fwd_kernel",))
    page = to_page("A <title>", [timed, *records[1:], wrong, absent])
    assert "<title>A &lt;title&gt;</title>" in page
    assert '<span class="badge passed">ours: 1 measured, 1 out of memory</span>' in page
    assert '<span class="badge peers">peers: 2 measured, 1 refused by parity, 1 absent' in page
    assert "&lt;b&gt; | too large" in page
    assert "<b> | too large" not in page
    assert page.count("<svg") == 2  # rates and ratios
    assert not re.search(r'(src|href)="(?!#|data:)', page)
    links = re.findall(r'<a href="#([^"]*)">([^<]*)', page)
    assert [text for _, text in links] == [
        "Run of 2026-11-21, commit 0123456789ab", "Flash attention",
    ]  # fmt: skip
    assert all(page.count(f'<section id="{id}">') == 1 for id, _ in links)
    for look, status in {"failed": "refused by parity", "lost": "out of memory"}.items():
        assert f'<td class="{look}">{status}' in page
    assert page.count('<tr class="absent">') == 1
    assert "<details><summary>1</summary><ol><li>flash_fwd_kernel" in page
    failed = to_page("Run", [replace(wrong, implementation="jax triton", target="sm90")])
    assert '<span class="badge failed">ours: 1 refused by parity' in failed


def test_command_writes_all_forms(tmp_path, records):
    append(tmp_path / "first.jsonl", records[:2])
    append(tmp_path / "second.jsonl", records[2:])
    paths = [str(tmp_path / name) for name in ("first.jsonl", "second.jsonl")]
    assert command.main(["report", *paths, "--output", str(tmp_path / "out")]) == 0
    written = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert set(written) == {"first.md", "first.html", "first.csv"}
    rows = list(csv.DictReader(written["first.csv"].splitlines()))
    assert [(r["case_name"], r["target"], r["times_median"], r["status"]) for r in rows] == [
        ("keys-1024", "sm90", "2.0", "ok"),
        ("keys-1024", "", "3.0", "ok"),
        ("keys-2048", "sm90", "", "out of memory"),
        ("keys-2048", "", "3.0", "ok"),
    ]


@pytest.mark.parametrize("content", [None, "", "{}\n"])
def test_command_names_a_file_it_cannot_use(tmp_path, capsys, content):
    path = tmp_path / "records.jsonl"
    if content is not None:
        path.write_text(content)
    assert command.main(["report", str(path), "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("python -m bench report: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", COMMITTED, ids=stem)
def test_the_committed_summary_is_of_the_committed_records(path):
    text, *plots = (files := summary(stem(path), load(path)))
    assert (RESULTS / text).read_text() == files[text]
    # A name such as h200-models-4096-steps.svg begins with that of other records, too.
    others = [stem(other) for other in COMMITTED if stem(other).startswith(f"{stem(path)}-")]
    found = {p.name for p in RESULTS.glob(f"{stem(path)}-*.svg")}
    assert {name for name in found if not name.startswith(tuple(others))} == set(plots)
    for plot in plots:
        assert "fill: #ffffff" in files[plot]  # readable on a dark page too
        assert "var(--" not in files[plot]


@pytest.fixture
def two_cards(record, tmp_path):
    """Each has a problem that the other lacks."""

    def of(device, watts, ours, peer, keys):
        shared = {"device": f"{device} (compute capability 8.0)", "card": {"watts": watts}}
        gpu = {"sm_mhz": 1410.0, "sm_mhz_lowest": 1300.0, "memory_mhz": 1593.0, "celsius": 60.0,
               "watts_highest": watts - 1, "throttle": []}  # fmt: skip
        made = [
            record(implementation="torch gluon", tflops=ours, gpu=gpu, error=0.25, **shared),
            record(implementation="torch triton", tflops=1.0, **shared),
            record(implementation="jax mosaic", status="absent", **shared),
            record(implementation="jax triton", tflops=ours / 2, **shared),
            record(implementation="FA2", target=None, tflops=peer, times=Times(3.0, 3.0, 3.0),
                   **shared),
            record(keys, implementation="torch gluon", status="skipped", message="", **shared),
        ]  # fmt: skip
        path = tmp_path / f"{device}.jsonl"
        append(path, made)
        return str(path)

    return [of("NVIDIA A100", 400.0, 200.0, 150.0, 7), of("NVIDIA H100", 700.0, 500.0, 450.0, 9)]


def test_files_of_several_cards_make_one_page_with_a_table_for_each(two_cards, tmp_path):
    assert command.main(["report", *two_cards, "--output", str(tmp_path)]) == 0
    page = (tmp_path / "NVIDIA A100.html").read_text()
    headings = re.findall("<h2>(.*?)</h2>", page)
    assert headings[:2] == ["NVIDIA A100", "NVIDIA H100"]
    assert "NVIDIA H100: Flash attention" in headings
    a100, h100 = re.findall(r"<section.*?</section>", page, re.DOTALL)[:2]
    titles = [re.findall("<th(?: [^>]*)?>([^<]*)", part) for part in (a100, h100)]
    assert titles[0] == titles[1] == [
        "case", "pass", "torch", "jax", "FA2", "cuDNN", "fastest peer", "/ torch", "/ jax",
    ]  # fmt: skip
    rows = re.findall(r"<tr><td.*", h100)
    found = [[re.sub("<.*?>", "", cell) for cell in row.split("<td")[1:]] for row in rows]
    found = [[cell.partition(">")[2] for cell in row] for row in found]
    assert found == [
        ["keys-1024", "forward", "500", "250", "450", "", "FA2", "1.50", "1.50"],
        ["keys-9", "forward", "skipped", "", "", "", "", "", ""],
    ]
    assert "SM 1410 MHz" in a100
    assert "power limit 400 W" in a100
    assert "1 of 1 results right, the largest error 0.25 of its budget" in a100
    text = (tmp_path / "NVIDIA A100.md").read_text()
    assert text.index("## NVIDIA A100") < text.index("## NVIDIA H100") < text.index("### Flash")
