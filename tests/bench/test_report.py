"""From records: tables, plots, the page; and that the documentation shows the records' numbers."""

import csv
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bench import __main__ as command
from bench.peaks import peaks
from bench.records import Times, append, load, stem
from bench.report.markdown import BEGIN, END, put_excerpt, summary
from bench.report.page import to_page
from bench.report.sections import SPEEDS, facts, peaks_table, sections, statuses
from bench.report.tables import best_peer, ratio, runs, to_csv
from bench.sampling import Sample, Sampler, log_path
from tests.bench.synthetic import campaign

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"


@pytest.fixture
def records(record):
    """Two lengths, ours and a peer; ours takes no time on the second."""
    peer = {"implementation": "FA2", "target": None, "times": Times(3.0, 2.9, 3.2), "tflops": 66.7}
    failed = {"status": "out of memory", "message": "MemoryError: <b> | too large"}
    return [record(), record(**peer), record(keys=2048, **failed), record(keys=2048, **peer)]


def markdown(records) -> str:
    return summary("name", records)["name.md"]


def table(markdown: str, heading: str) -> list[list[str]]:
    """The cells under a heading, rule left out."""
    _, rest = re.split(rf"{re.escape(heading)}(?:</summary>|:)?\n\n", markdown, maxsplit=1)
    lines = rest.split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [rows[0], *rows[2:]]


def test_markdown_shows_numbers_and_statuses(records):
    text = markdown(records)
    assert table(text, "Forward, TFLOP/s") == [
        ["case (all B2 H2 D64 bfloat16 window_size=(48, 16))", "torch triton sm90", "FA2"],
        ["S1024", "100", "66.7"],
        ["S2048", "out of memory", "66.7"],
    ]
    (section,) = sections(records)
    assert section.tables["Forward, milliseconds (spread between rounds)"][1:] == [
        ["S1024", "2.00 (10.0%)", "3.00 (10.0%)"],
        ["S2048", "out of memory", "3.00 (10.0%)"],
    ]
    assert table(text, SPEEDS) == [
        ["operation", "implementation", "best peer", "FA2"],
        ["forward", "torch triton sm90", "1.50 to 1.50", "1.50 to 1.50"],
    ]
    assert table(text, "Without a time")[1] == [
        "forward", "torch triton sm90", "out of memory", "MemoryError: <b> \\| too large",
        "keys-2048",
    ]  # fmt: skip
    assert "- versions: torch 2.0\n- commit: 0123456789ab\n- date: 2026-11-21\n" in text
    assert "- our rows: 1 measured, 1 out of memory\n- peers' rows: 2 measured\n" in text


def test_sm80_code_elsewhere_is_called_what_it_is(record):
    note = "it is not an A100's result"
    sm80 = record(target="sm80")
    assert note in markdown([sm80])
    assert note not in markdown([record()])
    a100 = replace(sm80, device="NVIDIA A100 (compute capability 8.0)")
    assert note not in markdown([a100])


def test_the_last_record_of_a_measurement_counts(record):
    late = record(tflops=321.0)
    assert runs([record(), late]) == [[late]]


def test_commits_are_not_compared(record, records):
    other = record(commit="ba9876543210", implementation="FA2", target=None)
    assert list(map(len, runs([*records, other]))) == [4, 1]
    text = markdown([record(), other])
    assert text.count("## Fake GPU") == 2
    assert "1.00 to 1.00" not in text


def test_a_ratio_above_one_is_ours_being_faster(record):
    row = {"FA2": record(times=Times(3.0, 3.0, 3.0)), "ours": record(times=Times(2.0, 2.0, 2.0))}
    assert ratio(row, "ours", "FA2") == 1.5
    assert ratio(row, "ours", "cuDNN") is None


@pytest.fixture(scope="module")
def run():
    """Return what a run on a GPU could leave."""
    (run,) = runs(campaign())
    return run


def column(section, title: str, **wanted: str) -> list[str]:
    """The cells of a column of a section's rows, of those rows that have the wanted cells."""
    head, *rows = section.every
    named = [dict(zip(head, row, strict=True)) for row in rows]
    return [row[title] for row in named if wanted.items() <= row.items()]


def test_every_row_has_its_share_of_the_limits_of_its_own_suite(record):
    peak = record(operation="peak", target=None, tflops=800.0)
    matmul = replace(peak, case={"name": "matmul"})
    other = replace(matmul, suite="fa2", tflops=400.0)
    h200 = [replace(r, device="NVIDIA H200") for r in (matmul, other, record())]
    (section,) = sections(h200)
    assert column(section, "of measured bf16 matmul") == ["12.5%"]  # 100 of 800
    assert column(section, "of datasheet") == ["10.1%"]  # 100 of 989
    (unknown,) = sections([record()])
    assert not {"of measured bf16 matmul", "of datasheet"} & set(unknown.every[0])


def test_a_decode_is_held_to_the_read_bandwidth(run):
    bounds = peaks(run)
    decode = next(r for r in run if r.operation == "decode")
    assert bounds.of(decode).measured == pytest.approx(4180, rel=1e-3)
    assert bounds.of(decode).datasheet == 4800
    assert bounds.of(decode).rate(decode) == decode.bytes_per_second / 1e9
    section = next(s for s in sections(run) if s.title == "Paged decode")
    share = column(section, "of measured read")[0]
    assert share == f"{decode.bytes_per_second / 4.18e12:.1%}"


def test_a_row_has_what_was_measured_beside_its_time(record):
    times = Times(0.5, 0.5, 0.5)
    full = record(
        span=Times(2.5, 2.5, 2.5), events=2.55, host=Times(0.03, 0.03, 0.03), kernels=("a", "b"),
        memory=3_000_000, error=0.25, gpu={"sm_mhz": 1700.0, "watts": 600.0},
    )  # fmt: skip
    best = record(implementation="cuDNN", target=None, times=times)
    section = sections([full, best])[0]
    cells = dict(zip(section.every[0], section.every[1], strict=True))
    assert cells | {
        "ms": "2.00", "spread": "10.0%", "best peer / this": "0.25 (cuDNN)", "span, ms": "2.50",
        "events - span": "2.0%", "host, us": "30.0", "kernels": "2", "memory, MB": "3.00",
        "error / budget": "0.250", "SM clock, MHz": "1700", "power, W": "600", "status": "ok",
    } == cells  # fmt: skip


def test_the_best_peer_is_the_fastest_with_a_time(record):
    def peer(name, ms):
        return record(implementation=name, target=None, times=Times(ms, ms, ms))

    row = {r.label: r for r in (record(), peer("FA2", 3.0), peer("cuDNN", 2.5))}
    assert best_peer(row) == "cuDNN"
    assert best_peer({"ours": record()}) is None


def test_facts_sum_up_the_clocks_the_spread_and_the_cross_check(record):
    gpu = {"sm_mhz": 1900.0, "sm_mhz_lowest": 1500.0, "memory_mhz": 3201.0, "watts": 600.0,
           "watts_highest": 700.0, "celsius": 70.0, "throttle": ["power cap"]}  # fmt: skip
    span = Times(2.0, 1.99, 2.01)
    near = record(gpu=gpu, span=span, events=2.02)
    far = record(keys=2048, gpu=gpu | {"sm_mhz_lowest": 1400.0}, span=span, events=1.9)
    found = facts([near, far])
    assert found["clocks"] == "SM 1900 MHz, at its lowest 1400; memory 3201 MHz"
    assert found["power"] == "up to 700 W, 70 °C; held back by power cap"
    assert "3.0% from CUPTI" in found["cross-check"]
    assert (
        "at most by 5.0% (torch triton sm90, forward, keys-2048; 1.0% between its rounds)"
        in found["cross-check"]
    )
    assert "FA2 and" not in found["cross-check"]
    libraries = [
        record(keys=keys, implementation="FA2", target=None, span=span, events=events)
        for keys, events in ((512, 2.04), (4096, 2.08))
    ]
    assert facts([near, far, *libraries])["cross-check"].endswith(
        "; for FA2 and cuDNN by 3.0% or less over 1 of 2, "
        "at most by 4.0% (FA2, forward, keys-4096; 1.0% between its rounds)"
    )
    assert found["spread"].startswith("10.0% between rounds")
    assert not {"clocks", "power", "cross-check"} & set(facts([record()]))


def test_measured_peaks_stand_beside_the_datasheet(run):
    grid = peaks_table(run)
    assert grid[0][:3] == ["peak", "datasheet", "beside flash"]
    assert grid[1][:3] == ["matmul, TFLOP/s", "989", "787 (79.6%)"]
    assert not any("matmul" in table for s in sections(run) for table in s.tables.values())


def test_a_peer_that_is_absent_everywhere_has_no_column(run):
    flash = sections(run)[0]
    assert "tokamax Triton" in flash.tables["Forward, TFLOP/s"][0]
    assert "tokamax Triton" not in flash.tables["Backward, TFLOP/s"][0]
    rows = {tuple(row[:3]): row[3:] for row in flash.tables["Without a time"]}
    message, cases = rows["backward", "tokamax Triton", "absent"]
    assert message == "it has no backward <here> | at all"
    assert cases == "32x512-d64, 32x512-d64-causal, 4x4096-d64 and 15 more"


def test_csv_has_every_field(run):
    rows = list(csv.DictReader(to_csv(run).splitlines()))
    assert len(rows) == len(run)
    row = next(row for row in rows if row["case_name"] == "sweep-32")
    assert (row["suite"], row["case_page_size"], row["versions_jax"]) == (
        "kvcache",
        "256",
        "0.11.2",
    )
    assert float(row["span_median"]) > 0
    assert float(row["host_p80"]) > 0
    assert row["kernels"] == "flash_fwd_kernel"
    assert {"power cap", ""} == {row["gpu_throttle"] for row in rows}


@pytest.mark.filterwarnings("error")  # such as a layout that does not fit its figure
def test_the_page_needs_nothing_else_and_escapes(records):
    page = to_page("A <title>", records)
    assert "<title>A &lt;title&gt;</title>" in page
    assert '<span class="badge passed">ours: 1 measured, 1 out of memory</span>' in page
    assert '<span class="badge peers">peers: 2 measured</span>' in page
    assert "&lt;b&gt; | too large" in page
    assert "<b> | too large" not in page
    assert page.count("<svg") == 2  # rates and ratios
    assert not re.search(r'(src|href)="(?!#|data:)', page)


def test_the_summary_begins_with_plots_that_need_no_page(run):
    text, *plots = (files := summary("run", run))
    assert text == "run.md"
    assert plots == ["run-forward.svg", "run-backward.svg", "run-decode.svg"]
    shown = re.findall(r"!\[(.*)\]\((.*)\)", files[text].split("## ")[0])
    assert [file for _, file in shown] == plots
    assert shown[0][0] == "Flash attention forward, causal (bfloat16; NVIDIA H200)"
    for plot in plots:
        assert "fill: #ffffff" in files[plot]  # readable on a dark page too
        assert "var(--" not in files[plot]


def test_command_writes_all_forms(tmp_path, records, capsys):
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


@pytest.mark.filterwarnings("error")
def test_the_page_leads_to_its_parts_and_shows_statuses(run):
    wanted = re.compile("16384-d256-causal|^sweep-32$|^2048-d64-f|matmul|read")  # all takes long
    few = [record for record in run if wanted.search(record.case["name"])]
    log = [Sample(seconds, 1980.0, 3201.0, 600.0, 60.0, 0x04) for seconds in (0.0, 9.0)]
    page = to_page("Run", few, {"kvcache": log})
    links = re.findall(r'<a href="#([^"]*)">([^<]*)', page)
    assert links[0][1] == "Run of 2026-11-21, commit 0123456789ab"
    assert len(links) == 4
    assert all(page.count(f'<section id="{id}">') == 1 for id, _ in links)
    count = Counter(r.status for r in few if r.operation != "peak")
    peers = statuses([r for r in few if r.is_peer and r.operation != "peak"])
    assert "refused by parity" in peers
    assert f'<span class="badge peers">peers: {peers}</span>' in page
    assert '<span class="badge passed">ours: ' in page  # what the peers fail is not ours
    for look, status in {"failed": "refused by parity", "lost": "out of memory"}.items():
        assert f'<td class="{look}">{status}' in page
    assert page.count('<tr class="absent">') == count["absent"] > 0
    assert page.count("Sampled while the suite was timed") == 1
    assert "<details><summary>1</summary><ol><li>flash_fwd_kernel" in page


def test_command_finds_the_log_beside_the_records(tmp_path, records):
    path = tmp_path / "records.jsonl"
    append(path, records)
    for seconds in (0.0, 0.05):
        with Sampler(lambda s=seconds: Sample(s, 1980.0, 3201.0, 500.0, 60.0, 0x04)) as sampler:
            pass
        sampler.write(log_path(path, "flash"), "job")
    assert command.main(["report", str(path), "--output", str(tmp_path)]) == 0
    assert "Sampled while the suite was timed" in (tmp_path / "records.html").read_text()


@pytest.mark.parametrize("content", [None, "", "{}\n"])
def test_command_names_a_file_it_cannot_use(tmp_path, capsys, content):
    path = tmp_path / "records.jsonl"
    if content is not None:
        path.write_text(content)
    assert command.main(["report", str(path), "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("python -m bench report: ")
    assert not (tmp_path / "out").exists()


COMMITTED = sorted(RESULTS.glob("*.jsonl.gz"), key=lambda path: path.name)
# Flash attention has two plots; h200 has decode as well, steps are one, and the rest are tables.
PLOTS = {
    "h200": 3,
    "h200-models": 3,
    "h200-fa2": 0,
    "h200-models-4096": 1,
    "h200-models-4096-jax": 1,
    "h200-models-4x4096-jax": 1,
    "h200-float32": 0,
    "h200-host": 0,
    "h200-packed": 0,
    "h200-packed-65536": 0,
    "h200-packed-sm90": 0,
    "h200-packed-peers": 0,
    "h200-patterns": 0,
    "h200-prefill": 0,
    "h200-sm90-256": 0,
}


@pytest.mark.parametrize("path", COMMITTED, ids=stem)
def test_the_committed_summary_is_of_the_committed_records(path):
    text, *plots = (files := summary(stem(path), load(path)))
    assert (RESULTS / text).read_text() == files[text]
    assert len(plots) == PLOTS.get(stem(path), 2)
    # A name such as h200-sm80-forward.svg begins with that of other records, too.
    others = [stem(other) for other in COMMITTED if stem(other).startswith(f"{stem(path)}-")]
    found = {p.name for p in RESULTS.glob(f"{stem(path)}-*.svg")}
    assert {name for name in found if not name.startswith(tuple(others))} == set(plots)
    assert not re.search(r"\b(seeds?|mended|makers?)\b", files[text], re.IGNORECASE)


def test_the_documentation_shows_the_tables_of_the_records():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    shown = [path for path in COMMITTED if f"report bench/results/{path.name}" in text]
    assert len(shown) == 1
    assert put_excerpt(text, load(shown[0])) == text, "run the command above its tables"


def test_an_excerpt_takes_the_place_of_what_is_between_the_marks(run):
    text = f"before {BEGIN} old {END} after"
    put = put_excerpt(text, run)
    assert put_excerpt(put, run) == put
    assert put.startswith(f"before {BEGIN}\n\n- GPU: NVIDIA H200")
    assert put.endswith(f"{END} after")
    for heading, cases in {
        "Forward, TFLOP/s": 6,
        "Backward, TFLOP/s": 6,
        "Decode, GB/s": 3,
    }.items():
        head, *rows = table(put, heading)
        assert len(rows) == cases
        assert {"torch triton sm90", "jax triton sm90"} <= set(head)
    assert "FlashInfer" in head
    assert not {"torch triton compiled sm90", "eager"} & set(table(put, "Forward, TFLOP/s")[0])


@pytest.mark.parametrize("text", ["", BEGIN, f"{END} {BEGIN}", f"{BEGIN} {END} {END}"])
def test_a_text_without_the_marks_is_refused(text, run):
    with pytest.raises(ValueError, match="text: expected one <!-- tables"):
        put_excerpt(text, run)


def test_command_writes_the_documentation(tmp_path, records):
    append(tmp_path / "records.jsonl", records)
    text = tmp_path / "text.md"
    arguments = ["report", str(tmp_path / "records.jsonl"), "--output", str(tmp_path)]
    arguments += ["--documentation", str(text)]
    assert command.main(arguments) == 2  # there is no such text
    text.write_text(f"{BEGIN}{END}")
    assert command.main(arguments) == 0
    assert text.read_text() == put_excerpt(f"{BEGIN}{END}", records)
