"""The report as markdown."""

from __future__ import annotations

from collections.abc import Sequence

from bench.records import Record
from bench.report.tables import (
    Grid,
    by_operation,
    markdown_table,
    milliseconds,
    runs,
    speeds,
    throughput,
    unmeasured,
)


def to_markdown(title: str, records: Sequence[Record]) -> str:
    """Every run under its device, every table under its heading."""
    parts = [f"# {title}"]
    for run in runs(records):
        parts += [f"## {run[0].device}", provenance(run)]
        parts += [f"**{note}**" for note in notes(run)]
        for heading, grid in tables(run):
            parts += [f"### {heading}", markdown_table(grid)]
    return "\n\n".join(parts) + "\n"


def tables(run: Sequence[Record]) -> list[tuple[str, Grid]]:
    """The tables of one run with their headings; a table without rows is left out."""
    found = []
    for operation, records in by_operation(run).items():
        name = operation.capitalize()
        if any(record.tflops is not None for record in records):
            found.append((f"{name}, TFLOP/s", throughput(records)))
        found.append((f"{name}, milliseconds (spread between rounds)", milliseconds(records)))
    if any(record.is_peer for record in run):
        found.append(("Peer's time / ours, least to most over the cases", speeds(run)))
    found.append(("Without a time", unmeasured(run)))
    return [(heading, grid) for heading, grid in found if len(grid) > 1]


def provenance(run: Sequence[Record]) -> str:
    """Versions, commit and date of a run, in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in run[0].versions.items())
    days = sorted({record.date[:10] for record in run})
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{versions}; commit {run[0].commit}; {span}."


def notes(run: Sequence[Record]) -> list[str]:
    """What a reader must know before comparing."""
    found = []
    if "capability 8.0" not in run[0].device and any(r.target == "sm80" for r in run):
        found.append(f"SM80 code here ran on {run[0].device}: it is not an A100's result.")
    return found
