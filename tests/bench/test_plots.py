"""What is drawn: the records' numbers, where they belong."""

from dataclasses import asdict, replace

import pytest
from matplotlib.figure import Figure

from bench.peaks import Peak, Peaks
from bench.records import ABLATIONS, Record, Times
from bench.report.plots import Picture, of_run, of_suite
from bench.report.plots.clocks import over_time
from bench.report.plots.rates import split_series
from bench.report.plots.style import styles
from bench.report.tables import speeds
from bench.sampling import Sample
from interop.parity.cases import DecodeCase
from tests.bench.synthetic import campaign

BOUNDS = Peaks(Peak("bf16 matmul", "TFLOP/s", 150.0, 989.0), Peak("read", "GB/s", 4180.0, 4800.0))


@pytest.fixture
def records(record):
    """Two lengths, ours and a peer; ours takes no time on the second."""
    peer = {"implementation": "FA2", "target": None, "times": Times(3.0, 2.9, 3.2), "tflops": 66.7}
    failed = {"status": "out of memory", "message": "MemoryError"}
    return [record(), record(**peer), record(keys=2048, **failed), record(keys=2048, **peer)]


def title_of(picture: Picture) -> str:
    """A picture's title without dtype and card, which it ends with."""
    title, where = picture.title.removesuffix(")").split(" (")
    assert where.endswith(("; Fake GPU", "; NVIDIA H200"))
    return title


def titles(records: list[Record]) -> list[str]:
    return [title_of(picture) for picture in of_suite(records, BOUNDS)]


def figure(pictures, title: str) -> Figure:
    (found,) = [picture for picture in pictures if title_of(picture) == title]
    assert isinstance(found, Picture)
    return found.figure


def test_cases_of_several_lengths_are_lines_and_others_dots(records, record):
    lines, dots = "Forward: TFLOP/s over length", "Forward: TFLOP/s by case"
    assert titles(records) == [lines, "Forward: peer's time / ours"]
    assert titles([record()]) == [dots]
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


def test_heat_map_holds_the_ratios(records):
    panel = figure(of_suite(records, BOUNDS), "Forward: peer's time / ours").axes[0]
    (mesh,) = panel.collections
    assert mesh.get_array().filled(0).tolist() == [[1.5], [0]]
    assert [text.get_text() for text in panel.texts] == ["1.50"]


@pytest.mark.parametrize("name", ABLATIONS)
def test_another_build_is_compared_with_no_peer(record, records, name):
    other = record(implementation=f"torch triton {name}", target="sm90")
    heat_map = figure(of_suite([*records, other], BOUNDS), "Forward: peer's time / ours")
    assert [axes.get_title(loc="left") for axes in heat_map.axes] == ["torch triton sm90"]
    assert [row[1] for row in speeds([*records, other])[1:]] == ["torch triton sm90"]


def test_roofline_stands_on_the_measured_and_the_datasheets_rates():
    run = campaign()
    axes = figure(of_run(run), "Roofline").axes[0]
    roofs = [line for line in axes.lines if line.get_linestyle() != "None"]
    assert [max(line.get_ydata()) for line in roofs] == pytest.approx([787, 989])
    assert [line.get_ydata()[0] / line.get_xdata()[0] for line in roofs] == pytest.approx(
        [4.18, 4.8]
    )
    drawn = sum(len(line.get_xdata()) for line in axes.lines) - sum(
        len(r.get_xdata()) for r in roofs
    )
    assert drawn == sum(bool(r.tflops) and r.operation != "peak" for r in run)


def test_time_is_shaded_where_the_clock_is_held_back():
    log = [Sample(60.0 * i, 1900.0, 3201.0, 600.0, 60.0, 0x04 * (i == 1)) for i in range(4)]
    clock, power = over_time(log).axes
    (shade,) = clock.collections
    shaded = shade.get_paths()[0].vertices[:, 0]
    assert (shaded.min(), shaded.max()) == (0.5, 1.5)
    assert list(power.lines[0].get_ydata()) == [600.0] * 4


def test_looks_tell_all_labels_apart():
    looks = styles([r for r in campaign() if r.suite == "flash" and r.operation != "peak"])
    assert len(looks) == 14
    told = {(s["color"], str(s["linestyle"]), s["marker"]) for s in looks.values()}
    assert len(told) == 14
    assert looks["torch triton sm90"]["color"] == looks["torch triton sm80"]["color"]
    assert looks["torch triton sm90"]["color"] != looks["jax triton sm90"]["color"]
