"""The report's summary: markdown and a few plots, as a repository's web page shows them."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.font_manager import FontProperties

from bench.records import Record
from bench.report.plots import Picture
from bench.report.plots.headline import headline
from bench.report.sections import SPEEDS, ceilings, facts, notes, sections
from bench.report.tables import Grid, markdown_table, runs
from interop.parity.plot import to_svg


def summary(name: str, records: Sequence[Record]) -> dict[str, str]:
    """Return the files of a summary by their names: NAME.md and the plots that it shows."""
    compared = runs(records)
    pictures = {f"{name}-{short}.svg": p for run in compared for short, p in headline(run)}
    plots = {file: _standalone(picture) for file, picture in pictures.items()}
    parts = [f"# Benchmark {name}"]
    parts += [f"![{picture.title}]({file})" for file, picture in pictures.items()]
    if pictures:
        parts.append("Bold lines are ours, dashed and hollow where they are SM80 code.")
    for run in compared:
        parts += _run(run)
    return {f"{name}.md": "\n\n".join(parts) + "\n", **plots}


def _run(run: Sequence[Record]) -> list[str]:
    """Where a run was measured, then each suite: speed-ups at once, its other tables folded."""
    parts = [f"## {run[0].device}, commit {run[0].commit[:12]}"]
    parts.append("\n".join(f"- {name}: {text}" for name, text in facts(run).items()))
    parts += [f"**{note}**" for note in notes(run)]
    if len(grid := ceilings(run)) > 1:
        parts += ["### Ceilings", markdown_table(grid)]
    for section in sections(run):
        tables = dict(section.tables)
        speeds = tables.pop(SPEEDS, None)
        parts += [f"### {section.title}", section.note]
        parts += [f"{SPEEDS}:", markdown_table(speeds)] if speeds else []
        parts += [_folded(t, grid) for t, grid in tables.items() if "milliseconds" not in t]
    return parts


def _folded(title: str, grid: Grid) -> str:
    table = markdown_table(grid)
    return f"<details><summary>{title}</summary>\n\n{table}\n\n</details>"


def _standalone(picture: Picture) -> str:
    """Return a picture as a file of its own: its title inside, on white, letters as outlines."""
    (legend,) = picture.figure.legends
    legend.set_title(picture.title, FontProperties(size=11, weight="bold"))
    return to_svg(picture.figure, standalone=True)
