"""Write the picture of README and the tables of docs/benchmarks.md from the committed records.

Each number is the geometric mean, over cases, of the fastest other library's time divided by ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from bench.records import Record, load
from bench.report.tables import best_peer, by_case, groups, ratio, runs
from interop.parity.cases import FlashCase, VarlenCase
from interop.rendering.tables import Grid, to_markdown
from twin_attention.targets.foreign import gluon_is_faster

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- python -m bench overview: begin -->", "<!-- end -->"
FRAMEWORKS = ("PyTorch", "JAX", "JAX without PyTorch")
SLOWER = 0.97  # cases below this speed are listed
_FAMILIES = {"torch": ("gluon", "triton", "twin"), "jax": ("mosaic", "triton", "twin")}


class Row(NamedTuple):
    """A row of a table, and the records that it is made of: files, suite, pass and cases."""

    title: str
    records: tuple[str, ...]
    suite: str
    operation: str
    keep: Callable[[dict[str, Any]], bool] = lambda case: True


class Ratio(NamedTuple):
    """The fastest peer's time over ours in one case, by framework; None where one has no time."""

    case: str
    peer: str
    by_framework: tuple[float | None, ...]


def _decodes(case: dict[str, Any], *tokens: int) -> bool:
    """Return True for decodes of 16-bit caches that share no page."""
    plain = case["kv_dtype"] is None and not case["name"].startswith("cascade")
    return plain and case["tokens"] in tokens and max(case["lengths"]) >= 1024


_MODELS = ("h200-models", "h200-models-4096", "h200-models-4096-jax", "h200-models-4x4096-jax")
ROWS = (
    Row("forward", ("h100-sm90-peers",), "flash", "forward"),
    Row("backward", ("h100-sm90-peers",), "flash", "backward"),
    Row("prefill over pages, chunks", ("h100-flashinfer",), "prefill", "forward",
        lambda case: case["name"].startswith(("chunks", "mixed"))),
    Row("paged decode, one token", ("h100-flashinfer",), "kvcache", "decode",
        lambda case: _decodes(case, 1)),
    Row("paged decode, 4 to 64 tokens", ("h100-flashinfer",), "kvcache", "decode",
        lambda case: _decodes(case, 4, 16, 64)),
    Row("packed forward", ("h200-packed-sm90",), "packed", "forward"),
    Row("packed backward", ("h200-packed-sm90",), "packed", "backward"),
    Row("training step", _MODELS, "end-to-end", "step"),
)  # fmt: skip
BARS = {
    "forward": ("forward",), "backward": ("backward",),
    "packed": ("packed forward", "packed backward"),
    "prefill": ("prefill over pages, chunks",), "decode": ("paged decode, one token",),
    "training step": ("training step",),
}  # fmt: skip


def measured() -> dict[Row, tuple[str, list[Ratio]]]:
    """Return by row the card and the ratio of each case."""
    files = {name for row in ROWS for name in row.records}
    found = {name: load(ROOT / "bench" / "results" / f"{name}.jsonl.gz") for name in files}
    return {row: _ratios(row, [r for name in row.records for r in found[name]]) for row in ROWS}


def _ratios(row: Row, records: Sequence[Record]) -> tuple[str, list[Ratio]]:
    kept = [r for r in records if (r.suite, r.operation) == (row.suite, row.operation)]
    kept = [r for r in kept if row.keep(r.case)]
    ratios = []
    for run in runs(kept):
        for case, timed in by_case(record for record in run if record.times).items():
            if (peer := best_peer(timed)) is not None:
                ours = [_default(timed, row.operation, name) for name in FRAMEWORKS]
                ratios.append(Ratio(case, peer, tuple(x and ratio(timed, x, peer) for x in ours)))
    return kept[0].device.partition(" (")[0].removesuffix(" 80GB HBM3"), ratios


def _default(row: dict[str, Record], operation: str, framework: str) -> str | None:
    """Return the label of what a framework runs by default on SM90, None if it has no time."""
    side = "torch" if framework == "PyTorch" else "jax"
    families = _FAMILIES[side]
    if framework == "JAX" and _gluon_is_faster(next(iter(row.values())).case, operation):
        families = ("gluon", *families)
    labels = (f"{side} {family} sm90" for family in families)
    return next((label for label in labels if label in row), None)


def _gluon_is_faster(case: dict[str, Any], operation: str) -> bool:
    kind = VarlenCase if "lengths" in case and "max_pages" not in case else FlashCase
    if operation not in ("forward", "backward") or "max_pages" in case:
        return False
    fields = {name: tuple(x) if isinstance(x, list) else x for name, x in case.items()}
    function = {"forward": "flash_fwd", "backward": "flash_bwd"}[operation]
    return gluon_is_faster(function, kind(**fields).spec, "sm90")


def tables(found: dict[Row, tuple[str, list[Ratio]]]) -> Iterator[tuple[str, Grid]]:
    """Yield a table for each card, and one of the cases in which another library is faster."""
    for card, rows in groups(found, lambda row: found[row][0]).items():
        grid: Grid = [["", *FRAMEWORKS, "cases", "fastest other library"]]
        for row in rows:
            ratios = found[row][1]
            cells = [_cell(ratios, i) for i in range(len(FRAMEWORKS))]
            cells[2] = "" if cells[2] == cells[1] else cells[2]
            peers = ", ".join(dict.fromkeys(ratio.peer for ratio in ratios))
            grid.append([row.title, *cells, str(len(ratios)), peers])
        yield card, grid
    slower: Grid = [["", "case", *FRAMEWORKS[:2], "fastest other library"]]
    for row, (_, ratios) in found.items():
        for case, peer, (torch, jax, _) in ratios:
            if min(torch or 1, jax or 1) < SLOWER:
                slower.append([row.title, case, _text(torch), _text(jax), peer])
    yield "Where another library is faster", slower


def _cell(ratios: Sequence[Ratio], i: int) -> str:
    if not (known := [x for r in ratios if (x := r.by_framework[i]) is not None]):
        return ""
    return f"**{geometric_mean(known):.2f}** ({min(known):.2f} to {max(known):.2f})"


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def bars(found: dict[Row, tuple[str, list[Ratio]]]) -> dict[str, tuple[float, float]]:
    """Return the picture's numbers: by name the geometric means of PyTorch and JAX."""
    by_title = {row.title: ratios for row, (_, ratios) in found.items()}

    def mean(titles: Sequence[str], i: int) -> float:
        values = (ratio.by_framework[i] for title in titles for ratio in by_title[title])
        return geometric_mean([value for value in values if value is not None])

    return {name: (mean(titles, 0), mean(titles, 1)) for name, titles in BARS.items()}


def to_svg(numbers: dict[str, tuple[float, float]], dark: bool) -> str:
    """Draw a pair of bars a row, with letters that a phone's width leaves readable."""
    light = ("#1f2328", "#1f6feb", "#bc5b00")
    ink, *colours = ("#e6edf3", "#6ea8fe", "#f2a65a") if dark else light
    left, unit, step, top = 118, 240, 42, 58
    bottom = top + step * len(numbers)
    parts = []
    for i, (name, pair) in enumerate(numbers.items()):
        y = top + i * step
        parts.append(f'<text x="{left - 10}" y="{y + 21}" text-anchor="end">{escape(name)}</text>')
        for j, (value, colour) in enumerate(zip(pair, colours, strict=True)):
            width, at = value * unit, y + 1 + 16 * j
            parts.append(_bar(left, at, width, colour))
            right = left + max(width, unit) + 6  # behind the line at 1
            parts.append(f'<text x="{right:.1f}" y="{at + 12}">{value:.2f}</text>')
    for j, (framework, colour) in enumerate(zip(FRAMEWORKS[:2], colours, strict=True)):
        at = left + 100 * j
        parts += [_bar(at, 28, 14, colour), f'<text x="{at + 20}" y="40">{framework}</text>']
    line = left + unit
    title = "Our speed / the fastest other library's"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 {bottom + 6}" role="img" \
aria-label="{title}" font-family="system-ui, sans-serif" font-size="14" fill="{ink}">
<text x="0" y="15" font-weight="bold">{title}</text>
{chr(10).join(parts)}
<path d="M{line} 50V{bottom}" stroke="{ink}" stroke-dasharray="4 3"/>
</svg>
"""


def _bar(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width:.1f}" height="14" fill="{colour}"/>'


def files() -> dict[Path, str]:
    """Return the pictures and the page with its tables, by path."""
    found = measured()
    page = ROOT / "docs" / "benchmarks.md"
    before, rest = page.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    parts = [part for title, grid in tables(found) for part in (f"## {title}", to_markdown(grid))]
    pictures = {
        ROOT / "docs" / "images" / f"speed{'-dark' * dark}.svg": to_svg(bars(found), dark)
        for dark in (False, True)
    }
    return pictures | {page: "\n\n".join([before + BEGIN, *parts, END + after])}


def add_parser(commands: argparse._SubParsersAction) -> None:
    about = "write the picture of README and the tables of docs/benchmarks.md"
    parser = commands.add_parser("overview", help=about, description=__doc__)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0
