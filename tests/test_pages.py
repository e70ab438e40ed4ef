"""The pages of parity and bench: on a phone, by keyboard, for screen readers, light and dark."""

from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from bench.records import load
from bench.report.page import to_page as bench_page
from bench.report.plots import headline, of_suite
from bench.report.sections import sections
from bench.report.tables import runs
from tests.browser import ask, serving
from twin_attention.contract.tolerances import Agreement
from twin_attention.interop.parity.records import CaseResult, Comparison, Report
from twin_attention.interop.parity.report import to_page as parity_page

RECORDS = Path(__file__).parents[1] / "bench/results/h100-flashinfer.jsonl.gz"
# The page's width, what is wider outside of scrolling boxes, levels of headings, pictures without a
# text, and the least contrast of a text.
LOOK = """(page, root, window) => {
  const numbers = colour => (colour.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(x => x / 255)
    .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (let each = element; each; each = each.parentElement) {
      const colour = numbers(window.getComputedStyle(each).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const contrasts = [...page.querySelectorAll("body *")].filter(element =>
    !/^(script|style)$/i.test(element.tagName)
    && !/fill: #/.test(element.getAttribute("style")) && [...element.childNodes].some(
      node => node.nodeType === 3 && node.textContent.trim())).map(element => {
    const style = window.getComputedStyle(element);
    const ink = numbers(element.closest("svg") ? style.fill : style.color);
    const [high, low] = [light(ink), light(behind(element))].sort((a, b) => b - a);
    return [(high + 0.05) / (low + 0.05), element.textContent.trim().slice(0, 40)];
  });
  const scrolls = element => element.closest(".scroll, .plot");
  return {
    width: root.scrollWidth,
    wide: [...page.querySelectorAll("body *")].filter(x => !scrolls(x.parentElement)
      && x.getBoundingClientRect().right > root.clientWidth + 1).map(x => x.tagName),
    headings: [...page.querySelectorAll("h1, h2, h3, h4")].map(x => Number(x.tagName[1])),
    unnamed: [...page.querySelectorAll("svg, img, input")].filter(x =>
      !x.closest("[aria-label], [alt]")).length,
    unreachable: [...page.querySelectorAll("th, .scroll, .plot")]
      .filter(x => x.tabIndex < 0).length,
    least: contrasts.sort((a, b) => a[0] - b[0])[0],
    texts: contrasts.length,
  };
}"""


def parity_report():
    agreements = [Agreement(0.4, 1.0, 0.1, 1.0, True), Agreement(1.2, 1.0, 0.1, 1.0, True)]
    cases = []
    for i in range(12):
        subjects = [f"{side}_attn {kind} sm90" for side in ("torch", "pallas") for kind in "ab"]
        compared = [
            Comparison(subject, "float64", output, agreements[i == 11 and output == "dv"])
            for subject in subjects for output in ("out", "lse", "dq", "dk", "dv")
        ]  # fmt: skip
        problem = {"batch": 1, "seq_q": 97, "seq_kv": 160, "heads_q": 4, "heads_kv": 2,
                   "head_dim": 72, "head_dim_v": None, "dtype": "bfloat16"}  # fmt: skip
        cases.append(CaseResult(f"a-case-with-a-long-name-{i}", problem, 1.5, [], compared))
    return Report({"device": "CPU", "versions": "torch 2.13.0, jax 0.10.2" * 4}, 12, cases)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    (folder / "parity.html").write_text(parity_page(parity_report()))
    (folder / "bench.html").write_text(bench_page("Benchmark", load(RECORDS)))
    with serving(folder) as address:
        yield folder, address


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "desktop"])
@pytest.mark.parametrize("page", ["parity.html", "bench.html"])
def test_a_page_fits_and_can_be_read(pages, page, width, dark):
    found = ask(*pages, page, LOOK, width, dark)
    assert found["width"] <= width
    assert found["wide"] == []
    levels = found["headings"]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert (found["unnamed"], found["unreachable"]) == (0, 0)
    assert found["texts"] > 100
    assert found["least"][0] >= 4.5, found["least"]


def test_a_key_sorts_a_table(pages):
    script = """(page, root, window) => {
      const heading = page.querySelector(".scroll.long th");
      const press = () => heading.dispatchEvent(
        new window.KeyboardEvent("keydown", {key: "Enter", bubbles: true}));
      const first = () => heading.closest("table").tBodies[0].rows[0].cells[0].textContent;
      return [0, 1].map(() => { press(); return [first(), heading.getAttribute("aria-sort")]; });
    }"""
    rising, falling = ask(*pages, "parity.html", script, 1280, dark=False)
    assert rising == ["a-case-with-a-long-name-0", "ascending"]
    assert falling == ["a-case-with-a-long-name-9", "descending"]


def crossings(figure: Figure) -> list[tuple[str, str]]:
    FigureCanvasAgg(figure).draw()
    found = []
    for axes in figure.axes:
        lines = [line for line in axes.lines if line.get_linestyle() not in ("None", "")]
        paths = [(x, x.get_path().transformed(x.get_transform())) for x in lines]
        for text in axes.texts:
            box = Text.get_window_extent(text)  # without the arrow of an annotation
            for line, path in paths:
                # A lane's faint line runs behind a name that stands on the page's colour.
                is_behind = line.get_zorder() < text.get_zorder() and text.get_bbox_patch()
                if not is_behind and path.intersects_bbox(box, filled=False):
                    found.append((text.get_text(), line.get_label()))
    return found


def test_no_label_crosses_a_line_of_benchs_plots():
    for run in runs(load(RECORDS.with_name("h200-flash.jsonl.gz"))):
        pictures = [picture for _, picture in headline(run)]
        for section in sections(run):
            pictures += of_suite(section.records, section.peaks)
        assert len(pictures) > 3
        for picture in pictures:
            assert crossings(picture.figure) == [], picture.title
