"""The report's summary in markdown, with plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap

from matplotlib.font_manager import FontProperties

from bench import registry
from bench.records import Record
from bench.report.cards import CAPTION, are_several, cards
from bench.report.plots import Picture, headline
from bench.report.plots.svg import to_svg
from bench.report.sections import SPEEDS, facts, notes, peaks_table, sections
from bench.report.tables import runs
from twin_attention.interop.rendering.tables import to_markdown

LETTERS_PER_INCH = 10  # of a picture's title


def summary(name: str, records: Sequence[Record]) -> dict[str, str]:
    compared = runs(records)
    pictures = {f"{name}-{short}.svg": p for run in compared for short, p in headline(run)}
    parts = [f"# {_title(records)} ({name})"]
    for file, picture in pictures.items():
        parts += [f"![{picture.title}]({file})", *filter(None, [picture.caption])]
    if pictures:
        parts.append("Bold lines are ours, dashed and hollow where they are SM80 code.")
    if are_several(records):
        for card in cards(records):
            parts += [f"## {card.title}", listed(card.facts), CAPTION, to_markdown(card.grid)]
    for run in compared:
        parts += [f"## {run[0].device}, commit {run[0].commit[:12]}", listed(facts(run))]
        parts += [f"**{note}**" for note in notes(run)]
        if len(grid := peaks_table(run)) > 1:
            parts += ["### Measured peaks", to_markdown(grid)]
        for section in sections(run):
            tables = dict(section.tables)
            first = SPEEDS if SPEEDS in tables else next(iter(tables), None)
            parts += [f"### {section.title}", section.note]
            parts += [f"{first}:", to_markdown(tables.pop(first))] if first else []
            parts += [
                f"<details><summary>{title}</summary>\n\n{to_markdown(grid)}\n\n</details>"
                for title, grid in tables.items()
                if "milliseconds" not in title
            ]
    plots = {file: _standalone(picture) for file, picture in pictures.items()}
    return {f"{name}.md": "\n\n".join(parts) + "\n", **plots}


def _title(records: Sequence[Record]) -> str:
    suites = dict.fromkeys(record.suite for record in records if record.operation != "peak")
    found = dict.fromkeys(record.device.split(" (")[0].split(" 80GB")[0] for record in records)
    return f"{', '.join(registry.SUITES[suite].title for suite in suites)}: {', '.join(found)}"


def listed(texts: Mapping[str, str]) -> str:
    return "\n".join(f"- {name}: {text}" for name, text in texts.items())


def _standalone(picture: Picture) -> str:
    """Return a picture as a file: with its title, on white, letters as outlines."""
    (legend,) = picture.figure.legends
    title = "\n".join(wrap(picture.title, int(picture.figure.get_figwidth() * LETTERS_PER_INCH)))
    legend.set_title(title, FontProperties(size=11, weight="bold"))
    return to_svg(picture.figure, standalone=True)
