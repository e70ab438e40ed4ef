"""The report as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import NamedTuple

from bench.records import Record, Status
from bench.report.plots import Picture, of_run, of_suite
from bench.report.sections import Section, ceilings, facts, notes, sections, statuses
from bench.report.tables import Grid, numeric, runs
from bench.sampling import Sample
from interop.parity.plot import to_svg

# How a row or a cell of a status looks: what failed is loud, what was to be expected is not.
_LOOKS: dict[Status, str] = {
    "ok": "passed",
    "failed": "failed",
    "refused by parity": "failed",
    "out of memory": "lost",
    "absent": "absent",
}
_NAME = 80  # characters of a kernel's name on the page; the CSV has all of it


class Chapter(NamedTuple):
    """A part of the page that the navigation leads to."""

    title: str
    html: str


def to_html(
    title: str, records: Sequence[Record], logs: Mapping[str, Sequence[Sample]] | None = None
) -> str:
    """Every run with its facts and limits, and a section for each of its suites.

    Args:
        title: of the page.
        records: of one run or more.
        logs: by suite, clocks and power over its run.
    """
    own, shared = files("bench.report"), files("interop.parity")
    compared = runs(records)
    rows = [record for run in compared for record in run if record.operation != "ceiling"]
    chapters = [chapter for run in compared for chapter in _chapters(run, logs or {})]
    return Template(own.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        style="".join(
            folder.joinpath("page.css").read_text(encoding="utf-8") for folder in (shared, own)
        ),
        script=shared.joinpath("page.js").read_text(encoding="utf-8"),
        title=escape(title),
        badges=_badges(rows),
        navigation="\n".join(
            f'<a href="#part-{i}">{escape(chapter.title)}</a>' for i, chapter in enumerate(chapters)
        ),
        chapters="\n".join(
            f'<section id="part-{i}">\n<h2>{escape(chapter.title)}</h2>\n{chapter.html}\n</section>'
            for i, chapter in enumerate(chapters)
        ),
    )


def _badges(rows: Sequence[Record]) -> str:
    """Say what became of our rows, red where one failed, and beside it of the peers'."""
    ours, peers = ([r for r in rows if r.is_peer == peer] for peer in (False, True))
    look = "failed" if any(_LOOKS[r.status] == "failed" for r in ours) else "passed"
    texts = [(look, "ours", statuses(ours)), ("peers", "peers", statuses(peers))]
    return " ".join(
        f'<span class="badge {look}">{whose}: {escape(text)}</span>'
        for look, whose, text in texts
        if text
    )


def _chapters(run: Sequence[Record], logs: Mapping[str, Sequence[Sample]]) -> Iterator[Chapter]:
    yield Chapter(
        f"Run of {run[0].date[:10]}, commit {run[0].commit[:12]}", "\n".join(_overview(run))
    )
    for section in sections(run):
        log = logs.get(section.records[0].suite, ())
        yield Chapter(section.title, "\n".join(_suite(section, log)))


def _overview(run: Sequence[Record]) -> Iterator[str]:
    terms = (f"<dt>{escape(name)}<dd>{escape(text)}" for name, text in facts(run).items())
    yield f'<dl class="facts">\n{chr(10).join(terms)}\n</dl>'
    yield from (f"<p><b>{escape(note)}</b></p>" for note in notes(run))
    if len(grid := ceilings(run)) > 1:
        yield f"<h3>Ceilings</h3>\n{_table(grid)}"
    yield from map(_picture, of_run(run))


def _suite(section: Section, log: Sequence[Sample]) -> Iterator[str]:
    if section.note:
        yield f'<p class="note">{escape(section.note)}</p>'
    yield from map(_picture, of_suite(section.records, section.bounds, log))
    for heading, grid in section.tables.items():
        yield f"<h3>{escape(heading)}</h3>\n{_table(grid)}"
    yield (
        "<h3>Every row</h3>\n"
        '<input type="search" placeholder="Filter: case, operation, implementation ..." '
        f'aria-label="Filter">\n{_table(section.every, section.records)}'
    )


def _picture(picture: Picture) -> str:
    return (
        f"<h3>{escape(picture.title)}</h3>\n<figure>\n{to_svg(picture.figure)}"
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def _table(grid: Grid, records: Sequence[Record] = ()) -> str:
    """A table to sort; where its rows are records, they look like their status and name kernels."""
    head, *body = grid
    numbers = numeric(grid)
    titles = "".join(
        f'<th class="number">{escape(title)}' if number else f"<th>{escape(title)}"
        for title, number in zip(head, numbers, strict=True)
    )
    rows = []
    for i, texts in enumerate(body):
        look = f' class="{_LOOKS[records[i].status]}"' if records else ""
        cells = (
            _kernels(records[i], text) if records and title == "kernels" else _cell(text, number)
            for title, text, number in zip(head, texts, numbers, strict=True)
        )
        rows.append(f"<tr{look}>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll{" long" * bool(records)}"><table>\n<thead><tr>{titles}</tr></thead>\n'
        f"<tbody>\n{chr(10).join(rows)}\n</tbody></table></div>"
    )


def _cell(text: str, number: bool) -> str:
    looks = ["number"] * number + [f"status-{look}" for look in [_LOOKS.get(text)] if look]  # type: ignore[call-overload]
    return f'<td class="{" ".join(looks)}">{escape(text)}' if looks else f"<td>{escape(text)}"


def _kernels(record: Record, text: str) -> str:
    """How many kernels a call has, which opens to their names; templates' are very long."""
    short = (name if len(name) <= _NAME else f"{name[:_NAME]}…" for name in record.kernels)
    names = "".join(f"<li>{escape(name)}" for name in short)
    opened = f"<details><summary>{text}</summary><ol>{names}</ol></details>" if names else text
    return f'<td class="number">{opened}'
