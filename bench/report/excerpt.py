"""What the documentation shows of records: a few tables, between two marks in its text."""

from __future__ import annotations

from collections.abc import Sequence

from bench.records import Record
from bench.report.limits import limits
from bench.report.sections import SPEEDS, facts, notes
from bench.report.tables import SHOWN, by_operation, markdown_table, rates, runs, speeds

BEGIN, END = "<!-- tables of the records: begin -->", "<!-- tables of the records: end -->"


def put_excerpt(text: str, records: Sequence[Record]) -> str:
    """The text, with tables of these records between its marks.

    Raises:
        ValueError: there are not these two marks.
    """
    try:
        before, rest = text.split(BEGIN)
        _, after = rest.split(END)
    except ValueError:
        raise ValueError(f"text: expected one {BEGIN} and after it one {END}") from None
    return f"{before}{BEGIN}\n\n{excerpt(records)}\n\n{END}{after}"


def excerpt(records: Sequence[Record]) -> str:
    """Flash attention at 4096 keys and the decode of batches, of each run that has any."""
    parts = []
    for run in runs(records):
        shown = [record for record in run if _is_shown(record)]
        if not shown:
            continue
        parts.append("\n".join(f"- {name}: {text}" for name, text in facts(run).items()))
        parts += [f"**{note}**" for note in notes(run)]
        for operation, group in by_operation(shown).items():
            limit = limits(run).of(group[0])
            parts.append(f"### {operation.capitalize()}, {limit.unit}")
            parts.append(markdown_table(rates(group, limit)))
            parts.append(f"{SPEEDS}:")
            parts.append(markdown_table(speeds(group)))
    return "\n\n".join(parts)


def _is_shown(record: Record) -> bool:
    if record.implementation not in SHOWN:
        return False
    if record.suite == "flash":
        return record.case["seq_kv"] == 4096
    return record.suite == "kvcache" and not record.case["name"].startswith("sweep")
