"""Compare two runs of the same measurements; needs no GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from bench.records import Record, Times, load
from twin_attention.interop.rendering.tables import Grid, console_of, to_terminal

_LOG_WIDTH = 120  # of the table where nothing says how wide the output is
_NEAR = 0.01  # ranges that lie apart by more are shown


class Change(NamedTuple):
    record: Record
    before: Times
    after: Times

    @property
    def relative(self) -> float:
        """The medians' difference over the earlier one: below 0 if the later is faster."""
        return self.after.median / self.before.median - 1

    @property
    def gap(self) -> float:
        (low, high), (other_low, other_high) = self.before.range, self.after.range
        return max(0.0, low - other_high, other_low - high) / self.before.median


def changes(before: Iterable[Record], after: Iterable[Record]) -> list[Change]:
    """Return measurements timed in both runs, in the later run's order; the last record counts."""
    earlier, later = (
        {record.measurement: record for record in records if record.operation != "peak"}
        for records in (before, after)
    )
    return [
        Change(record, first.times, record.times)
        for name, record in later.items()
        if (first := earlier.get(name)) and first.times and record.times
    ]


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "compare",
        help="compare two runs of the same measurements",
        description=f"{__doc__} Exit code 1: one of our implementations is slower by more.",
    )
    parser.add_argument("before", type=Path, metavar="BEFORE", help="records, JSON lines")
    parser.add_argument("after", type=Path, metavar="AFTER", help="records, JSON lines")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Return 1 if one of ours is slower, 2 if nothing can be compared."""
    try:
        found = changes(*map(load, (arguments.before, arguments.after)))
        if not found:
            raise ValueError("expected a measurement with times in both files, got none")
    except (OSError, ValueError) as error:
        print(f"python -m bench compare: {error}", file=sys.stderr)
        return 2
    apart = [change for change in found if change.gap > _NEAR]
    console = console_of(_LOG_WIDTH)
    if apart:
        console.print(to_terminal(_grid(sorted(apart, key=lambda change: change.relative))))
    for line in summary(found):
        console.print(line, highlight=False, soft_wrap=True)
    return int(any(not change.record.is_peer and change.relative > 0 for change in apart))


def summary(found: Sequence[Change]) -> list[str]:
    meet = sum(change.gap == 0 for change in found)
    near = sum(0 < change.gap <= _NEAR for change in found)
    lines = [
        f"{len(found)} measured in both runs: ranges of {meet} meet, {near} lie apart by up to "
        f"{_NEAR:.0%}, {len(found) - meet - near} by more"
    ]
    for name, is_peer in (("ours", False), ("peers", True)):
        if group := [change for change in found if change.record.is_peer == is_peer]:
            distances = [abs(change.relative) for change in group]
            lines.append(
                f"{name}: medians differ by {median(distances):.1%} in the middle, by "
                f"{max(distances):.1%} at most; {sum(c.relative < 0 for c in group)} of "
                f"{len(group)} are faster in the later run"
            )
    return lines


def _grid(apart: Sequence[Change]) -> Grid:
    titles = ["case", "operation", "implementation", "before,\nms", "after,\nms", "change",
              "apart\nby"]  # fmt: skip
    rows = [
        [
            change.record.case["name"], change.record.operation, change.record.label,
            f"{change.before.median:.4f}", f"{change.after.median:.4f}",
            f"{change.relative:+.1%}", f"{change.gap:.1%}",
        ]
        for change in apart
    ]  # fmt: skip
    return [titles, *rows]
