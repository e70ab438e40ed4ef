"""The report as markdown."""

from __future__ import annotations

from collections.abc import Sequence

from bench.records import Record
from bench.report.sections import ceilings, facts, notes, sections
from bench.report.tables import markdown_table, runs


def to_markdown(title: str, records: Sequence[Record]) -> str:
    """Every run under its device, every suite under its title, every table under its heading.

    A row for each record is what the page and the CSV have.
    """
    parts = [f"# {title}"]
    for run in runs(records):
        parts.append(f"## {run[0].device}")
        parts.append("\n".join(f"- {name}: {text}" for name, text in facts(run).items()))
        parts += [f"**{note}**" for note in notes(run)]
        if len(grid := ceilings(run)) > 1:
            parts += ["### Ceilings", markdown_table(grid)]
        for section in sections(run):
            parts += [f"## {section.title}", *filter(None, [section.note])]
            for heading, grid in section.tables.items():
                parts += [f"### {heading}", markdown_table(grid)]
    return "\n\n".join(parts) + "\n"
