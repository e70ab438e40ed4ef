import csv
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from bench import __main__ as command
from bench.ours import FOREIGN_NAMES
from bench.peaks import Peak, Peaks, peaks
from bench.records import ABLATIONS, Times, append, load, stem
from bench.report.markdown import summary
from bench.report.page import to_page
from bench.report.plots import of_run, of_suite
from bench.report.plots.clocks import over_time
from bench.report.plots.rates import split_series
from bench.report.plots.style import styles
from bench.report.sections import SPEEDS, facts, peaks_table, sections
from bench.report.tables import best_peer, problem, ratio, runs, speeds, to_csv
from bench.runner import _print
from bench.sampling import Sample, Sampler, log_path
from bench.suites.flash import jobs as flash_jobs
from bench.suites.kvcache import jobs as kvcache_jobs
from twin_attention.interop.parity.cases import DecodeCase
from twin_attention.targets.target import TARGETS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
COMMITTED = sorted(RESULTS.glob("*.jsonl.gz"), key=lambda path: path.name)
BOUNDS = Peaks(Peak("bf16 matmul", "TFLOP/s", 150.0, 989.0), Peak("read", "GB/s", 4180.0, 4800.0))


@pytest.fixture
def records(record):
    """Ours takes no time on the second length."""
    peer = {"implementation": "FA2", "target": None, "times": Times(3.0, 2.9, 3.2), "tflops": 66.7}
    failed = {"status": "out of memory", "message": "MemoryError: <b> | too large"}
    return [record(), record(**peer), record(keys=2048, **failed), record(keys=2048, **peer)]


@pytest.fixture(scope="module")
def dense():
    return load(RESULTS / "h100-sm90-peers.jsonl.gz")


@pytest.fixture(scope="module")
def decodes():
    found = load(RESULTS / "h100-flashinfer.jsonl.gz")
    return [record for record in found if record.suite == "kvcache"]


def markdown(records) -> str:
    return summary("name", records)["name.md"]


def table(markdown: str, heading: str) -> list[list[str]]:
    _, rest = re.split(rf"{re.escape(heading)}(?:</summary>|:)?\n\n", markdown, maxsplit=1)
    lines = rest.split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [rows[0], *rows[2:]]


def column(section, title: str) -> list[str]:
    titles, *rows = section.every
    return [row[titles.index(title)] for row in rows]


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


def test_what_is_one_measurement_and_what_is_compared(record, records):
    late = record(tflops=321.0)
    assert runs([record(), late]) == [[late]]
    other = record(commit="ba9876543210", implementation="FA2", target=None)
    assert list(map(len, runs([*records, other]))) == [4, 1]
    text = markdown([record(), other])
    assert text.count("## Fake GPU") == 2
    assert "1.00 to 1.00" not in text


def test_a_ratio_above_one_is_ours_being_faster_than_the_fastest_peer_with_a_time(record):
    def peer(name, ms):
        return record(implementation=name, target=None, times=Times(ms, ms, ms))

    found = (record(), peer("FA2", 3.0), peer("cuDNN", 2.5),
             record(implementation="FA3", target=None, status="failed"))  # fmt: skip
    row = {r.label: r for r in found}
    assert best_peer(row) == "cuDNN"
    assert best_peer({"ours": record()}) is None
    assert ratio(row, "torch triton sm90", "FA2") == 1.5
    assert ratio(row, "torch triton sm90", "FA3") is None
    assert ratio(row, "torch triton sm90", "FA9") is None


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


def test_a_decode_is_held_to_the_read_bandwidth(decodes):
    run = decodes
    bounds = peaks(run).of(decode := next(r for r in run if r.operation == "decode"))
    read = next(r for r in run if r.case["name"] == "read").bytes_per_second
    assert (bounds.measured, bounds.datasheet) == (read / 1e9, 3350)
    (section,) = sections(run)
    assert column(section, "of measured read")[0] == f"{decode.bytes_per_second / read:.1%}"


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


def test_facts_sum_up_the_clocks_the_spread_and_the_cross_check(record):
    gpu = {"sm_mhz": 1900.0, "sm_mhz_lowest": 1500.0, "memory_mhz": 3201.0, "watts": 600.0,
           "watts_highest": 700.0, "celsius": 70.0, "throttle": ["power cap"]}  # fmt: skip
    span = Times(2.0, 1.99, 2.01)
    near = record(gpu=gpu, span=span, events=2.02)
    far = record(keys=2048, gpu=gpu | {"sm_mhz_lowest": 1400.0}, span=span, events=1.9)
    libraries = [
        record(keys=keys, implementation="FA2", target=None, span=span, events=events)
        for keys, events in ((512, 2.04), (4096, 2.08))
    ]
    found = facts([near, far, *libraries])
    assert found["clocks"] == "SM 1900 MHz, at its lowest 1400; memory 3201 MHz"
    assert found["power"] == "up to 700 W, 70 °C; held back by power cap"
    most = "at most by 5.0% (torch triton sm90, forward, keys-2048; 1.0% between its rounds)"
    assert most in found["cross-check"]
    assert found["cross-check"].endswith(
        "; for FA2 and cuDNN by 3.0% or less over 1 of 2, "
        "at most by 4.0% (FA2, forward, keys-4096; 1.0% between its rounds)"
    )
    assert found["spread"].startswith("10.0% between rounds")
    assert not {"clocks", "power", "cross-check"} & set(facts([record()]))


def test_a_peer_that_is_absent_everywhere_has_no_column_but_a_reason(record):
    absent = {"implementation": "FA9", "target": None, "status": "absent", "message": "no <b>"}
    records = [record(keys=n, **x) for n in range(1024, 6144, 1024) for x in ({}, absent)]
    (section,) = sections(records)
    assert section.tables["Forward, TFLOP/s"][0][1:] == ["torch triton sm90"]
    assert section.tables["Without a time"][1:] == [
        ["forward", "FA9", "absent", "no <b>", "keys-1024, keys-2048, keys-3072 and 2 more"]
    ]


def test_csv_has_every_field(decodes):
    run = decodes
    rows = list(csv.DictReader(to_csv(run).splitlines()))
    assert len(rows) == len(run)
    row = next(row for row in rows if row["case_name"] == "sweep-32")
    assert (row["suite"], row["case_page_size"], row["times_median"]) == (
        "kvcache", "256", str(next(r for r in run if r.case["name"] == "sweep-32").times.median),
    )  # fmt: skip
    assert {"span_median", "host_p80", "kernels", "gpu_throttle", "versions_jax"} <= row.keys()


def test_the_terminals_table_stands_beside_the_peak_and_the_best_peer(record):
    peak = replace(record(operation="peak", target=None, tflops=800.0), case={"name": "matmul"})
    peers = [
        record(implementation=name, target=None, times=Times(ms, ms, ms))
        for name, ms in (("FA2", 3.0), ("cuDNN", 1.0))
    ]
    absent = record(implementation="peer", target=None, status="absent", message="not installed")
    failed = record(implementation="[b]other", status="failed", message="RuntimeError")
    console = Console(width=160)
    with console.capture() as capture:
        _print([peak, record(), *peers, absent, failed], console)
    lines = capture.get().splitlines()
    cells = {
        name: line.removeprefix(f"  {name}").split()
        for name in ("torch triton sm90", "[b]other sm90", "peer ")
        for line in lines
        if line.startswith(f"  {name}")
    }
    assert cells["torch triton sm90"] == ["2.0000", "10.0%", "100.0", "12.5%", "0.50"]
    assert cells["[b]other sm90"] == ["failed"]
    assert "peer " not in cells
    assert any("1 absent" in line for line in lines)


def figure(pictures, title):
    (found,) = [picture for picture in pictures if picture.title.startswith(title)]
    return found.figure


def test_cases_of_several_lengths_are_lines_and_others_dots(records, record):
    lines, dots = "Forward: TFLOP/s over length", "Forward: TFLOP/s by case"
    assert [picture.title for picture in of_suite(records, BOUNDS)] == [
        f"{lines} (bfloat16; Fake GPU)", "Forward: peer's time / ours (bfloat16; Fake GPU)",
    ]  # fmt: skip
    other = replace(record(), case=record().case | {"name": "alone", "head_dim": 128})
    pictures = list(of_suite([record(), record(keys=2048), other], BOUNDS))
    panel = figure(pictures, lines).axes[0]
    assert [list(axis) for axis in panel.lines[0].get_data()] == [[1024, 2048], [100, 100]]
    assert panel.lines[1].get_ydata()[0] == 150  # what was measured; the datasheet's is far above
    assert len(panel.lines) == 2
    assert list(figure(pictures, dots).axes[0].lines[0].get_xdata()) == [100]


def test_wide_tables_are_a_series_of_their_own(record):
    def decode(length, pages):
        case = DecodeCase(f"{length}-{pages}", (length,), max_pages=pages)
        return replace(record(operation="decode"), case=asdict(case))

    narrow, wide = ([decode(n, pages or n // 16) for n in (64, 128)] for pages in (None, 999))
    series, alone = split_series(narrow + wide)
    assert (sorted(series, key=str), alone) == (sorted([narrow, wide], key=str), [])


@pytest.mark.parametrize("other", ABLATIONS)
def test_the_heat_map_holds_ratios_and_no_build_that_is_wrong_on_purpose(record, records, other):
    another = record(implementation=f"torch triton {other}")
    (panel,) = figure(of_suite([*records, another], BOUNDS), "Forward: peer's time / ours").axes
    assert panel.get_title(loc="left") == "torch triton sm90"
    (mesh,) = panel.collections
    assert mesh.get_array().filled(0).tolist() == [[1.5], [0]]
    assert [text.get_text() for text in panel.texts] == ["1.50"]
    assert [row[1] for row in speeds([*records, another])[1:]] == ["torch triton sm90"]


def test_roofline_stands_on_the_measured_and_the_datasheets_rates(dense):
    run = dense
    axes = figure(of_run(run), "Roofline").axes[0]
    roofs = [line for line in axes.lines if line.get_linestyle() != "None"]
    bounds = peaks(run)
    assert [max(line.get_ydata()) for line in roofs] == [bounds.matmul.measured, 989]
    assert [line.get_ydata()[0] / line.get_xdata()[0] for line in roofs] == pytest.approx(
        [bounds.read.measured / 1e3, 3.35]
    )
    drawn = [len(line.get_xdata()) for line in axes.lines if line not in roofs]
    assert sum(drawn) == sum(bool(r.tflops) and r.operation != "peak" for r in run)


def test_time_is_shaded_where_the_clock_is_held_back():
    log = [Sample(60.0 * i, 1900.0, 3201.0, 600.0, 60.0, 0x04 * (i == 1)) for i in range(4)]
    clock, power = over_time(log).axes
    (shade,) = clock.collections
    shaded = shade.get_paths()[0].vertices[:, 0]
    assert (shaded.min(), shaded.max()) == (0.5, 1.5)
    assert list(power.lines[0].get_ydata()) == [600.0] * 4


def test_looks_tell_all_labels_apart(record):
    (job, *_) = flash_jobs(TARGETS)
    subjects = [x for x in job.factories if x.implementation not in FOREIGN_NAMES]
    looks = styles([record(implementation=x, target=target) for x, target in subjects])
    told = {(s["color"], str(s["linestyle"]), s["marker"]) for s in looks.values()}
    assert len(told) == len(looks) > 10
    assert looks["torch triton sm90"]["color"] == looks["torch triton sm80"]["color"]
    assert looks["torch triton sm90"]["color"] != looks["jax triton sm90"]["color"]


@pytest.mark.filterwarnings("error")
def test_the_page_needs_nothing_else_escapes_and_shows_statuses(record, records):
    wrong = record(implementation="FA9", target=None, status="refused by parity", message="no")
    absent = record(implementation="FA8", target=None, status="absent", message="no")
    log = [Sample(seconds, 1980.0, 3201.0, 600.0, 60.0, 0x04) for seconds in (0.0, 9.0)]
    timed = replace(records[0], kernels=("flash_fwd_kernel",))
    page = to_page("A <title>", [timed, *records[1:], wrong, absent], {"flash": log})
    assert "<title>A &lt;title&gt;</title>" in page
    assert '<span class="badge passed">ours: 1 measured, 1 out of memory</span>' in page
    assert '<span class="badge peers">peers: 2 measured, 1 refused by parity, 1 absent' in page
    assert "&lt;b&gt; | too large" in page
    assert "<b> | too large" not in page
    assert page.count("<svg") == 3  # rates, ratios and clocks
    assert not re.search(r'(src|href)="(?!#|data:)', page)
    links = re.findall(r'<a href="#([^"]*)">([^<]*)', page)
    assert [text for _, text in links] == [
        "Run of 2026-11-21, commit 0123456789ab", "Flash attention",
    ]  # fmt: skip
    assert all(page.count(f'<section id="{id}">') == 1 for id, _ in links)
    for look, status in {"failed": "refused by parity", "lost": "out of memory"}.items():
        assert f'<td class="{look}">{status}' in page
    assert page.count('<tr class="absent">') == 1
    assert page.count("Sampled while the suite was timed") == 1
    assert "<details><summary>1</summary><ol><li>flash_fwd_kernel" in page
    failed = to_page("Run", [replace(wrong, implementation="jax triton", target="sm90")])
    assert '<span class="badge failed">ours: 1 refused by parity' in failed


def test_command_writes_all_forms_and_finds_the_log_beside_the_records(tmp_path, records):
    append(tmp_path / "first.jsonl", records[:2])
    append(tmp_path / "second.jsonl", records[2:])
    for seconds in (0.0, 0.05):
        with Sampler(lambda s=seconds: Sample(s, 1980.0, 3201.0, 500.0, 60.0, 0x04)) as sampler:
            pass
        sampler.write(log_path(tmp_path / "first.jsonl", "flash"), "job")
    paths = [str(tmp_path / name) for name in ("first.jsonl", "second.jsonl")]
    assert command.main(["report", *paths, "--output", str(tmp_path / "out")]) == 0
    written = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert set(written) == {"first.md", "first.html", "first.csv"}
    assert "Sampled while the suite was timed" in written["first.html"]
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
            record(implementation="torch gluon", tflops=ours, gpu=gpu, **shared),
            record(implementation="torch triton", tflops=1.0, **shared),
            record(implementation="jax mosaic", status="absent", **shared),
            record(implementation="jax triton", tflops=ours / 2, **shared),
            record(implementation="FA2", target=None, tflops=peer, times=Times(3.0, 3.0, 3.0),
                   **shared),
            record(keys, implementation="torch gluon", status="skipped", message="", **shared),
            record(suite="parity", operation="parity", times=None, tflops=None, error=0.25,
                   implementation="torch gluon", **shared),
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


def test_cards_of_one_name_with_other_limits_are_not_one(record):
    first, second = record(card={"watts": 300.0}), record(card={"watts": 400.0})
    assert len(runs([first, second])) == 2
    assert first.key != second.key


def test_cases_that_differ_in_shared_pages_have_names_of_their_own():
    cases = [job.case for job in kvcache_jobs(["sm90"])[-3:]]
    texts = [problem(case) for case in cases]
    assert len({*texts}) == 3
    assert [text.rpartition(" ")[2] for text in texts] == [
        "shared_pages=512", "shared_pages=0", "shared_pages=0",
    ]  # fmt: skip
