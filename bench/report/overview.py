"""Write README's picture, tables of docs/benchmarks.md and docs/hugging-face.md, from records.

A speed is the geometric mean, over cases, of the fastest other library's time divided by ours.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from bench.ranges import RangeCase
from bench.records import Record, load
from bench.report.tables import best_peer, by_case, groups, number, percent, ratio, runs
from twin_attention.interop.parity.cases import DecodeCase, FlashCase, PagedCase, VarlenCase
from twin_attention.interop.rendering.tables import Grid, to_markdown
from twin_attention.targets import paged
from twin_attention.targets.foreign import gluon_is_faster

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- python -m bench overview: begin -->", "<!-- end -->"
FRAMEWORKS = ("PyTorch", "JAX", "JAX without PyTorch")
SLOWER = 0.97  # cases below this speed are listed
_FAMILIES = {"torch": ("gluon", "triton", "twin"), "jax": ("mosaic", "triton", "twin")}
_FUNCTIONS = {
    "forward": "flash_fwd", "backward": "flash_bwd", "both": "flash_bwd", "jvp": "flash_jvp",
    "decode": "paged_decode",
}  # fmt: skip
_MODELS = ("h200-models", "h200-models-4x4096")


class Row(NamedTuple):
    title: str
    files: tuple[str, ...]
    suite: str
    operation: str
    keep: Callable[[dict[str, Any]], bool] = lambda case: True


class Ratio(NamedTuple):
    case: str
    peer: str
    by_framework: tuple[float | None, ...]


Found = dict[Row, tuple[str, list[Ratio]]]  # by row the card, and each case


def _decodes(tokens: Sequence[int]) -> Callable[[dict[str, Any]], bool]:
    return lambda case: (
        case["kv_dtype"] is None
        and case["tokens"] in tokens
        and max(case["lengths"]) >= 1024
        and not case["latent"]
        and not case["name"].startswith("cascade")
    )


ROWS = (
    Row("forward", ("h200-flash",), "flash", "forward"),
    Row("backward", ("h200-flash",), "flash", "backward"),
    Row("forward, D 512", ("h200-wide",), "flash", "forward"),
    Row("backward, D 512", ("h200-wide",), "flash", "backward"),
    Row("packed forward", ("h200-packed",), "packed", "forward"),
    Row("packed backward", ("h200-packed",), "packed", "backward"),
    Row("ranges of keys, forward", ("h200-ranges",), "ranges", "forward"),
    Row("ranges of keys, with gradients", ("h200-ranges",), "ranges", "both"),
    Row("out and its tangent", ("h200-jvp",), "jvp", "jvp"),
    Row("prefill over pages, chunks", ("h100-flashinfer",), "prefill", "forward",
        lambda case: case["name"].startswith(("chunks", "mixed"))),
    Row("paged decode, one token", ("h200-kvcache",), "kvcache", "decode", _decodes([1])),
    Row("paged decode, 4 to 64 tokens", ("h200-kvcache",), "kvcache", "decode",
        _decodes([4, 16, 64])),
    Row("paged decode, latent cache", ("h200-kvcache",), "kvcache", "decode",
        lambda case: case["latent"]),
    Row("training step", _MODELS, "end-to-end", "step"),
)  # fmt: skip
# Of each bar of the picture, its rows.
BARS = {
    "forward": ("forward",), "backward": ("backward",),
    "packed": ("packed forward", "packed backward"), "prefill": ("prefill over pages, chunks",),
    "decode": ("paged decode, one token",), "training step": ("training step",),
}  # fmt: skip


def measured() -> Found:
    files = {file for row in ROWS for file in row.files}
    records = {file: load(ROOT / "bench" / "results" / f"{file}.jsonl.gz") for file in files}
    return {row: _ratios(row, [r for file in row.files for r in records[file]]) for row in ROWS}


def _ratios(row: Row, records: Sequence[Record]) -> tuple[str, list[Ratio]]:
    kept = [
        r for r in records
        if r.times and (r.suite, r.operation) == (row.suite, row.operation) and row.keep(r.case)
    ]  # fmt: skip
    ratios = []
    for run in runs(kept):
        # A training step is compared within its framework.
        parts = groups(run, lambda r: r.framework).values() if row.operation == "step" else [run]
        for case, timed in (x for part in parts for x in by_case(part).items()):
            if (peer := best_peer(timed)) is not None:
                ours = [_default(timed, row.operation, name) for name in FRAMEWORKS]
                ratios.append(Ratio(case, peer, tuple(ratio(timed, x, peer) for x in ours)))
    return kept[0].device.split(" (")[0].removesuffix(" 80GB HBM3"), ratios


def _default(timed: dict[str, Record], operation: str, framework: str) -> str:
    side = "torch" if framework == "PyTorch" else "jax"
    families = _FAMILIES[side]
    if framework != "PyTorch":
        spec = _spec(next(iter(timed.values())).case)
        if operation == "decode" and paged.slower("paged_decode", spec, "sm90"):
            families = families[1:]
        if framework == "JAX" and operation in _FUNCTIONS:
            function = _FUNCTIONS[operation]
            if gluon_is_faster(function, spec, "sm90"):
                families = ("gluon", *families)
    labels = (f"{side} {family} sm90" for family in families)
    return next((label for label in labels if label in timed), "")


def _spec(case: dict[str, Any]) -> Any:
    kinds = {"new_tokens": PagedCase, "max_pages": DecodeCase, "lengths": VarlenCase,
             "pattern": RangeCase}  # fmt: skip
    kind = next((kind for name, kind in kinds.items() if name in case), FlashCase)
    own = {field.name for field in fields(kind)}
    values: dict[str, Any] = {
        x: tuple(y) if isinstance(y, list) else y for x, y in case.items() if x in own
    }
    return kind(**values).spec


def tables(found: Found) -> Iterator[tuple[str, Grid]]:
    """Yield a table for each card, and one of the cases in which another library is faster."""
    for card, rows in groups(found, lambda row: found[row][0]).items():
        grid: Grid = [["", *FRAMEWORKS[:2], "fastest other library"]]
        for row in rows:
            ratios = found[row][1]
            torch, jax, alone = (_cell(ratios, i) for i in range(len(FRAMEWORKS)))
            peers = ", ".join(dict.fromkeys(ratio.peer for ratio in ratios))
            grid.append([f"{row.title}, {len(ratios)} cases", torch, jax, peers])
            if alone not in ("", jax):
                grid.append([f"{row.title}, {FRAMEWORKS[2]}", "", alone, peers])
        yield card, grid
    slower: Grid = [["", "case", *FRAMEWORKS[:2], "fastest other library"]]
    for row, (_, ratios) in found.items():
        for case, peer, (*both, _) in ratios:
            if min(x or 1 for x in both) < SLOWER:
                texts = ["" if x is None else f"{x:.2f}" for x in both]
                slower.append([row.title, case, *texts, peer])
    yield "Where another library is faster", slower


def _cell(ratios: Sequence[Ratio], i: int) -> str:
    known = [x for ratio in ratios if (x := ratio.by_framework[i]) is not None]
    if not known:
        return ""
    count = f", {len(known)} cases" if len(known) < len(ratios) else ""
    return f"**{geometric_mean(known):.2f}** ({min(known):.2f}–{max(known):.2f}{count})"


def bars(found: Found) -> dict[str, tuple[float, float]]:
    def mean(titles: Sequence[str], i: int) -> float:
        rows = (ratios for row, (_, ratios) in found.items() if row.title in titles)
        values = (ratio.by_framework[i] for ratios in rows for ratio in ratios)
        return geometric_mean([value for value in values if value is not None])

    return {name: (mean(rows, 0), mean(rows, 1)) for name, rows in BARS.items()}


def to_svg(numbers: dict[str, tuple[float, float]], dark: bool) -> str:
    light = ("#1f2328", "#1f6feb", "#bc5b00")
    ink, *colours = ("#e6edf3", "#6ea8fe", "#f2a65a") if dark else light
    left, unit, step, top = 118, 240, 42, 58
    line, bottom = left + unit, top + step * len(numbers)
    parts = []

    def bar(x: float, y: float, width: float, colour: str, behind: float, text: str) -> None:
        parts.append(f'<rect x="{x}" y="{y}" width="{width:.1f}" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{behind:.1f}" y="{y + 12}">{text}</text>')

    for j, (framework, colour) in enumerate(zip(FRAMEWORKS[:2], colours, strict=True)):
        bar(left + 100 * j, 28, 14, colour, left + 100 * j + 20, framework)
    for i, (name, pair) in enumerate(numbers.items()):
        y = top + i * step
        parts.append(f'<text x="{left - 10}" y="{y + 21}" text-anchor="end">{name}</text>')
        for j, (value, colour) in enumerate(zip(pair, colours, strict=True)):
            width = value * unit
            behind = left + max(width, unit) + 6  # of the line at 1
            bar(left, y + 1 + 16 * j, width, colour, behind, f"{value:.2f}")
    title = "Our speed / the fastest other library's"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 {bottom + 6}" role="img" \
aria-label="{title}" font-family="system-ui, sans-serif" font-size="14" fill="{ink}">
<text x="0" y="15" font-weight="bold">{title}</text>
{chr(10).join(parts)}
<path d="M{line} 50V{bottom}" stroke="{ink}" stroke-dasharray="4 3"/>
</svg>
"""


def models(records: Sequence[Record]) -> Grid:
    """Return the table of docs/hugging-face.md: milliseconds, and tokens that the judge prefers."""
    labels = {"torch twin sm90": "ours", "torch sdpa": "SDPA", "torch eager": "eager"}
    titles = {"step": "step, ms", "generate": "64 tokens, ms", "tokens": "same tokens"}
    rows: Grid = [["", *(f"{x}: {name}" for x in titles.values() for name in labels.values())]]
    of_models = (r for r in records if r.operation != "peak")
    for size, group in groups(of_models, lambda r: r.case["size"]).items():
        found = {(r.operation, r.label): number(r.times.median) for r in group if r.times} | {
            ("tokens", r.label): percent(r.judged)
            for r in group
            if r.operation == "generate" and r.judged is not None
        }
        rows.append([size, *(found.get((x, label), "") for x in titles for label in labels)])
    return rows


def files() -> dict[Path, str]:
    found, docs = measured(), ROOT / "docs"
    parts = [part for title, grid in tables(found) for part in (f"## {title}", to_markdown(grid))]
    path = ROOT / "bench" / "results" / "h200-hugging-face.jsonl.gz"
    written = {"benchmarks.md": parts}
    if path.exists():
        written["hugging-face.md"] = [to_markdown(models(load(path)))]
    pages = {}
    for name, parts in written.items():
        before, rest = (docs / name).read_text(encoding="utf-8").split(BEGIN)
        pages[docs / name] = "\n\n".join([before + BEGIN, *parts, END + rest.split(END)[1]])
    names = {"speed": False, "speed-dark": True}
    pictures = {
        docs / "images" / f"{x}.svg": to_svg(bars(found), dark) for x, dark in names.items()
    }
    return pictures | pages


def add_parser(commands: argparse._SubParsersAction) -> None:
    about = "write README's picture and tables of documents"
    commands.add_parser("overview", help=about, description=__doc__).set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
    return 0
