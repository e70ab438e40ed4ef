"""``python -m bench compare``: where two runs of the same measurements lie apart; needs no GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.records import Record, load
from bench.statistics import Times


@dataclass(frozen=True)
class Change:
    """One measurement in two runs.

    Attributes:
        before, after: its records, both with times.
    """

    before: Record
    after: Record

    @property
    def relative(self) -> float:
        """The medians' difference over the earlier one: below 0 where the later run is faster."""
        return _times(self.after).median / _times(self.before).median - 1

    @property
    def gap(self) -> float:
        """How far the two ranges lie apart over the earlier median; 0 where they meet."""
        (low, high), (other_low, other_high) = _times(self.before).range, _times(self.after).range
        return max(0.0, low - other_high, other_low - high) / _times(self.before).median

    @property
    def is_regression(self) -> bool:
        """True where an implementation of ours became slower."""
        return not self.after.is_peer and self.relative > 0


def changes(before: Iterable[Record], after: Iterable[Record]) -> list[Change]:
    """What has a time in both runs, ceilings left out, in the later one's order.

    Of the same measurement the last record counts.
    """
    earlier, later = (
        {record.measurement: record for record in records if record.operation != "ceiling"}
        for records in (before, after)
    )
    pairs = [(earlier[name], record) for name, record in later.items() if name in earlier]
    return [Change(*pair) for pair in pairs if all(record.times for record in pair)]


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to ``python -m bench``."""
    parser = commands.add_parser(
        "compare",
        help="where two runs of the same measurements lie apart",
        description=f"{__doc__} Exit code 1: one of our implementations is slower by more.",
    )
    parser.add_argument("before", type=Path, metavar="BEFORE", help="records, JSON lines")
    parser.add_argument("after", type=Path, metavar="AFTER", help="records, JSON lines")
    parser.add_argument("--filter", default="", help="part of a case's name")
    parser.add_argument(
        "--percent",
        type=float,
        default=1.0,
        help="show what lies apart by more than this (default: 1)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison; returns 1 when one of ours is slower, 2 when there is none to make."""
    try:
        runs = [load(path) for path in (arguments.before, arguments.after)]
        found = [c for c in changes(*runs) if arguments.filter in c.after.case["name"]]
        if not found:
            raise ValueError("expected a measurement with times in both files, got none")
    except (OSError, ValueError) as error:
        print(f"python -m bench compare: {error}", file=sys.stderr)
        return 2
    apart = [change for change in found if change.gap > arguments.percent / 100]
    console = Console()
    if apart:
        console.print(_table(sorted(apart, key=lambda change: change.relative)))
    for line in summary(found, arguments.percent):
        console.print(line, highlight=False, soft_wrap=True)
    return int(any(change.is_regression for change in apart))


def summary(found: Sequence[Change], percent: float) -> list[str]:
    """How many meet, how many lie how far apart, and how far the medians do."""
    meet = sum(change.gap == 0 for change in found)
    near = sum(0 < change.gap <= percent / 100 for change in found)
    lines = [
        f"{len(found)} measured in both runs: ranges of {meet} meet, {near} lie apart by up to "
        f"{percent:g} %, {len(found) - meet - near} by more"
    ]
    groups = {
        "ours": [change for change in found if not change.after.is_peer],
        "peers": [change for change in found if change.after.is_peer],
    }
    for name, group in groups.items():
        if group:
            distances = sorted(abs(change.relative) for change in group)
            lines.append(
                f"{name}: medians differ by {median(distances):.1%} in the middle, by "
                f"{distances[-1]:.1%} at most; {sum(c.relative < 0 for c in group)} of "
                f"{len(group)} are faster in the later run"
            )
    return lines


def _table(apart: Sequence[Change]) -> Table:
    table = Table("case", "operation", "implementation")
    for title in ("before, ms", "after, ms", "change", "apart by"):
        table.add_column(title, justify="right")
    for change in apart:
        record = change.after
        medians = (f"{_times(r).median:.4f}" for r in (change.before, record))
        table.add_row(
            record.case["name"], record.operation, record.label, *medians,
            f"{change.relative:+.1%}", f"{change.gap:.1%}",
        )  # fmt: skip
    return table


def _times(record: Record) -> Times:
    assert record.times is not None
    return record.times
