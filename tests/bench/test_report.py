"""From records: tables, plots, the page; and that the documentation shows the records' numbers."""

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench import __main__ as command
from bench.records import append, load
from bench.report.markdown import to_markdown
from bench.report.page import to_html
from bench.report.plots import figures
from bench.report.tables import number, ratio, runs
from bench.statistics import Times

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


@pytest.fixture
def records(record):
    """Two lengths, ours and a peer; ours takes no time on the second."""
    peer = {"implementation": "FA2", "target": None, "times": Times(3.0, 2.9, 3.2), "tflops": 66.7}
    failed = {"status": "out of memory", "message": "MemoryError: <b> | too large"}
    return [record(), record(**peer), record(keys=2048, **failed), record(keys=2048, **peer)]


def table(markdown: str, heading: str) -> list[list[str]]:
    """The cells under a heading, rule left out."""
    lines = markdown.split(f"### {heading}\n\n")[1].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [rows[0], *rows[2:]]


def test_markdown_shows_numbers_and_statuses(records):
    text = to_markdown("Title", records)
    problem = "B2 Sq{0} Skv{0} Hq2 Hkv2 D64 bfloat16 window_size=(48, 16)"
    assert table(text, "Forward, TFLOP/s") == [
        ["case", "Triton sm90", "FA2"],
        [problem.format(1024), "100", "66.7"],
        [problem.format(2048), "out of memory", "66.7"],
    ]
    assert table(text, "Forward, milliseconds (spread between rounds)")[1:] == [
        [problem.format(1024), "2.00 (10.0%)", "3.00 (10.0%)"],
        [problem.format(2048), "out of memory", "3.00 (10.0%)"],
    ]
    assert table(text, "Peer's time / ours, least to most over the cases") == [
        ["operation", "implementation", "FA2"],
        ["forward", "Triton sm90", "1.50 to 1.50"],
    ]
    assert table(text, "Without a time")[1] == [
        "keys-2048", "forward", "Triton sm90", "out of memory", "MemoryError: <b> \\| too large",
    ]  # fmt: skip
    assert "torch 2.0; commit 0123456789ab; 2026-11-21." in text


def test_sm80_code_elsewhere_is_called_what_it_is(record):
    note = "it is not an A100's result"
    sm80 = record(target="sm80")
    assert note in to_markdown("Title", [sm80])
    assert note not in to_markdown("Title", [record()])
    a100 = replace(sm80, device="NVIDIA A100 (compute capability 8.0)")
    assert note not in to_markdown("Title", [a100])


def test_the_last_record_of_a_measurement_counts(record):
    late = record(tflops=321.0)
    assert runs([record(), late]) == [[late]]


def test_commits_are_not_compared(record, records):
    other = record(commit="ba9876543210", implementation="FA2", target=None)
    assert list(map(len, runs([*records, other]))) == [4, 1]
    text = to_markdown("Title", [record(), other])
    assert text.count("## Fake GPU") == 2
    assert "1.00 to 1.00" not in text


def test_a_ratio_above_one_is_ours_being_faster(record):
    row = {"FA2": record(times=Times(3.0, 3.0, 3.0)), "ours": record(times=Times(2.0, 2.0, 2.0))}
    assert ratio(row, "ours", "FA2") == 1.5
    assert ratio(row, "ours", "cuDNN") is None


@pytest.mark.parametrize(
    ("value", "text"), [(1234.5, "1234"), (99.94, "99.9"), (1.1, "1.10"), (0.0123, "0.0123")]
)
def test_number(value, text):
    assert number(value) == text


def test_cases_of_several_lengths_are_lines_and_others_bars(records, record):
    assert list(figures(records)) == ["TFLOP/s over length", "Peer's time / ours"]
    assert list(figures([record()])) == ["TFLOP/s by case"]
    other = replace(record(), case=record().case | {"name": "alone", "head_dim": 128})
    drawn = figures([record(), record(keys=2048), other])
    assert list(drawn) == ["TFLOP/s over length", "TFLOP/s by case"]
    (line,) = drawn["TFLOP/s over length"].axes[0].lines
    assert [list(axis) for axis in line.get_data()] == [[1024, 2048], [100, 100]]
    assert [bar.get_width() for bar in drawn["TFLOP/s by case"].axes[0].patches] == [100]


def test_heat_map_holds_the_ratios(records):
    image = figures(records)["Peer's time / ours"].axes[0].images[0].get_array()
    assert image[0, 0] == 1.5
    assert image.shape == (2, 1)
    assert [text.get_text() for text in figures(records)["Peer's time / ours"].axes[0].texts] == [
        "1.50"
    ]


@pytest.mark.filterwarnings("error")  # such as a layout that does not fit its figure
def test_the_page_needs_nothing_else_and_escapes(records):
    page = to_html("A <title>", records)
    assert "<title>A &lt;title&gt;</title>" in page
    assert "3 measured, 1 without a time" in page
    assert page.count("&lt;b&gt; | too large") == 2  # in the run's table and in that of all records
    assert "<b> | too large" not in page
    assert page.count("<svg") == 2
    assert not re.search(r'(src|href)="(?!#|data:)', page)


def test_command_writes_all_forms(tmp_path, records, capsys):
    append(tmp_path / "first.jsonl", records[:2])
    append(tmp_path / "second.jsonl", records[2:])
    paths = [str(tmp_path / name) for name in ("first.jsonl", "second.jsonl")]
    assert command.main(["report", *paths, "--output", str(tmp_path / "out")]) == 0
    written = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert set(written) == {"first.md", "first.html", "first.csv"}
    rows = list(csv.DictReader(written["first.csv"].splitlines()))
    assert [(r["case_name"], r["target"], r["median_ms"], r["status"]) for r in rows] == [
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


COMMITTED = sorted(RESULTS.glob("*.jsonl"), key=lambda path: path.name)


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_tables_are_of_the_committed_records(path):
    expected = to_markdown(f"Benchmark {path.stem}", load(path))
    assert path.with_suffix(".md").read_text() == expected


def test_the_documentation_shows_the_tables_of_the_records():
    shown = TABLE.findall((ROOT / "docs" / "benchmarks.md").read_text())
    made = [t for path in COMMITTED for t in TABLE.findall(path.with_suffix(".md").read_text())]
    assert len(shown) >= 3
    assert [t for t in shown if t not in made] == []
