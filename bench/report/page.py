from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape

from bench.records import Record
from bench.report.cards import CAPTION, are_several, cards
from bench.report.cards import title as card_title
from bench.report.plots import Picture, of_suite
from bench.report.plots.svg import to_svg
from bench.report.sections import Section, facts, notes, peaks_table, sections, statuses
from bench.report.tables import runs
from twin_attention.interop.rendering import page
from twin_attention.interop.rendering.tables import Cell, to_html

Follow = Callable[[Iterable[tuple[str, str]]], Iterable[tuple[str, str]]]

# A failure is loud, an expected absence is not.
_LOOKS = {
    "failed": "failed",
    "refused by parity": "failed",
    "out of memory": "lost",
    "absent": "absent",
    "skipped": "absent",
}
_NAME = 80  # characters of a kernel's name on the page; templates are very long, the CSV has all
_INTRODUCTION = (
    "Device time of one call, copies and casts included, the L2 cache flushed before it (where a "
    "suite times the host, its note says so): the median of the rounds' medians. A spread is how "
    "far the rounds' medians lie apart. FLOPs are those of the query-key pairs that the mask "
    "keeps. Where a ratio is above 1, ours is faster than the peer. Click a column's title to sort "
    "by it."
)


def to_page(title: str, records: Sequence[Record], follow: Follow = iter) -> str:
    """Return a page of all runs; `follow` wraps the chapters, as a progress bar does."""
    compared = runs(records)
    measured = [record for run in compared for record in run if record.operation != "peak"]
    chapters = [*follow(_all_chapters(records))]
    links = (f'<a href="#part-{i}">{escape(name)}</a>' for i, (name, _) in enumerate(chapters))
    parts = (
        f'<section id="part-{i}">\n<h2>{escape(name)}</h2>\n{html}\n</section>'
        for i, (name, html) in enumerate(chapters)
    )
    body = [f"<p>{_INTRODUCTION}</p>", "<nav>", *links, "</nav>", *parts]
    return page.page(title, _badges(measured), body)


def _badges(records: Sequence[Record]) -> list[tuple[str, str]]:
    ours, peers = ([r for r in records if r.is_peer == peer] for peer in (False, True))
    look = "failed" if any(_LOOKS.get(r.status) == "failed" for r in ours) else "passed"
    texts = [(look, "ours", statuses(ours)), ("peers", "peers", statuses(peers))]
    return [(look, f"{whose}: {text}") for look, whose, text in texts if text]


def _all_chapters(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    several = are_several(records)
    if several:
        yield from _cards(records)
    for run in runs(records):
        prefix = f"{card_title(run)}: " if several else ""
        for name, html in _chapters(run):
            yield prefix + name, html


def number_of_chapters(records: Sequence[Record]) -> int:
    """Return the most chapters that `to_page` makes; a suite of only peaks has none."""
    compared = runs(records)
    suites = sum(len({record.suite for record in run}) for run in compared)
    return suites + len(compared) * (1 + are_several(records))


def _cards(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    for card in cards(records):
        titles, *rows = card.grid
        cells = ([Cell(text, _LOOKS.get(text, "")) for text in row] for row in rows)
        note = f'<p class="note">{escape(CAPTION)}</p>'
        yield card.title, "\n".join([page.facts(card.facts), note, to_html(titles, cells)])


def _chapters(run: Sequence[Record]) -> Iterator[tuple[str, str]]:
    title = f"Run of {run[0].date[:10]}, commit {run[0].commit[:12]}"
    yield title, "\n".join(_overview(run))
    for section in sections(run):
        yield section.title, "\n".join(_suite(section))


def _overview(run: Sequence[Record]) -> Iterator[str]:
    yield page.facts(facts(run))
    yield from (f"<p><b>{escape(note)}</b></p>" for note in notes(run))
    if len(grid := peaks_table(run)) > 1:
        yield f"<h3>Measured peaks</h3>\n{to_html(grid[0], grid[1:])}"


def _suite(section: Section) -> Iterator[str]:
    yield f'<p class="note">{escape(section.note)}</p>'
    yield from map(_picture, of_suite(section.records, section.peaks))
    for heading, (titles, *rows) in section.tables.items():
        cells = ([Cell(text, _LOOKS.get(text, "")) for text in row] for row in rows)
        yield f"<h3>{escape(heading)}</h3>\n{to_html(titles, cells)}"
    titles, *rows = section.every
    cells = [
        [_cell(record, *pair) for pair in zip(titles, row, strict=True)]
        for record, row in zip(section.records, rows, strict=True)
    ]
    looks = [_LOOKS.get(record.status, "") for record in section.records]
    yield f"<h3>Every row</h3>\n{to_html(titles, cells, looks, filtered=True)}"


def _cell(record: Record, title: str, text: str) -> Cell:
    if title != "kernels":
        return Cell(text, _LOOKS.get(text, ""))
    short = (name if len(name) <= _NAME else f"{name[:_NAME]}…" for name in record.kernels)
    return Cell(text, details=list(short))


def _picture(picture: Picture) -> str:
    """Return a picture, in a box that scrolls, with a caption; a screen reader says its title."""
    title = escape(picture.title)
    text = f"<figcaption>{escape(picture.caption)}</figcaption>" if picture.caption else ""
    box = f'<div class="plot" tabindex="0" role="img" aria-label="{title}">'
    drawn = f"<figure>\n{box}{to_svg(picture.figure)}</div>{text}</figure>"
    return f"<h3>{title}</h3>\n{drawn}"
