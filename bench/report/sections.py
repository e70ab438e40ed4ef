"""What a report shows of a run, whatever its form: facts, limits, and a section for each suite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from bench import suites
from bench.records import Record
from bench.report.limits import Limit, Limits, limits
from bench.report.tables import (
    Grid,
    by_operation,
    by_suite,
    every,
    memory,
    milliseconds,
    number,
    percent,
    rates,
    speeds,
    unmeasured,
)

SPEEDS = "Speed-up over each peer: its time / ours (min to max over cases)"
_NEAR = 0.03  # what a cross-check may be off by


@dataclass(frozen=True)
class Section:
    """One suite of one run.

    Attributes:
        title, note: the suite's.
        records: its records by operation, ceilings left out.
        bounds: the run's limits.
        tables: by heading, those with a row or more.
        every: a row for each of `records`, in their order.
    """

    title: str
    note: str
    records: list[Record]
    bounds: Limits
    tables: dict[str, Grid]
    every: Grid


def sections(run: Sequence[Record]) -> list[Section]:
    """The suites of a run, each held to the ceilings that were measured with it."""
    found = []
    for name, group in by_suite(run).items():
        records = [record for part in by_operation(group).values() for record in part]
        suite = suites.load(name)
        own = limits([record for record in run if record.suite == name])
        found.append(
            Section(suite.TITLE, suite.NOTE, records, own, _tables(records, suite.columns, own),
                    every(records, suite.columns, own))
        )  # fmt: skip
    return found


def _tables(
    records: Sequence[Record], columns: Callable[[Record], suites.Cells], bounds: Limits
) -> dict[str, Grid]:
    tables: dict[str, Grid] = {}
    for operation, group in by_operation(records).items():
        name, limit = operation.capitalize(), bounds.of(group[0])
        if any(limit.rate(record) for record in group):
            tables[f"{name}, {limit.unit}"] = rates(group, limit)
        tables[f"{name}, milliseconds (spread between rounds)"] = milliseconds(group)
        if "memory, MB" in columns(group[0]):  # the suite is about it
            tables[f"{name}, MB added at the peak (saved by the forward)"] = memory(group)
    tables[SPEEDS] = speeds(records)
    tables["Without a time"] = unmeasured(records)
    return {heading: grid for heading, grid in tables.items() if len(grid) > 1}


def statuses(records: Sequence[Record]) -> str:
    """Count records by status: how many are measured, and what became of the others."""
    counts = Counter("measured" if r.status == "ok" else r.status for r in records)
    order = ("measured", "refused by parity", "failed", "out of memory", "absent")
    return ", ".join(f"{counts[status]} {status}" for status in order if counts[status])


def facts(run: Sequence[Record]) -> dict[str, str]:
    """Where, when and with what a run was measured, and how far its numbers hold."""
    days = sorted({record.date[:10] for record in run})
    found = {
        "GPU": run[0].device,
        "versions": ", ".join(f"{name} {text}" for name, text in run[0].versions.items()),
        "commit": run[0].commit,
        "date": days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}",
    }
    measured = [record for record in run if record.operation != "ceiling"]
    for whose, peers in (("our rows", False), ("peers' rows", True)):
        if text := statuses([record for record in measured if record.is_peer == peers]):
            found[whose] = text
    gpus = [record.gpu for record in run if record.gpu]
    if gpus:
        reasons = sorted({reason for gpu in gpus for reason in gpu["throttle"]})
        found["clocks"] = (
            f"SM {median(gpu['sm_mhz'] for gpu in gpus):.0f} MHz, at its lowest "
            f"{min(gpu['sm_mhz_lowest'] for gpu in gpus):.0f}; memory "
            f"{median(gpu['memory_mhz'] for gpu in gpus):.0f} MHz"
        )
        found["power"] = (
            f"up to {max(gpu['watts_highest'] for gpu in gpus):.0f} W, "
            f"{max(gpu['celsius'] for gpu in gpus):.0f} °C; "
            f"held back by {', '.join(reasons) if reasons else 'nothing'}"
        )
    spreads = sorted(record.times.spread for record in run if record.times)
    if spreads:
        tail = spreads[int(0.95 * (len(spreads) - 1))]
        found["spread"] = (
            f"{percent(median(spreads))} between rounds, {percent(tail)} or less in 95% of rows"
        )
    checked = [
        _Check(abs(record.events / record.span.median - 1), record.span.spread, record)
        for record in run
        if record.events is not None and record.span is not None
    ]
    if checked:
        found["cross-check"] = (
            f"CUDA events differ by {percent(median(c.difference for c in checked))} from CUPTI's "
            f"span over {len(checked)} calls, {_most(checked)}"
        )
        libraries = [check for check in checked if check.record.label in ("FA2", "cuDNN")]
        if libraries:
            near = sum(check.difference <= _NEAR for check in libraries)
            found["cross-check"] += (
                f"; for FA2 and cuDNN by {percent(_NEAR)} or less over {near} of "
                f"{len(libraries)}, {_most(libraries)}"
            )
    return found


class _Check(NamedTuple):
    """How far events are from the span, how far the span's rounds lie apart, and of what."""

    difference: float
    spread: float
    record: Record


def _most(checks: Sequence[_Check]) -> str:
    most = max(checks, key=lambda check: check.difference)
    name = f"{most.record.label}, {most.record.operation}, {most.record.case['name']}"
    rounds = f"{percent(most.spread)} between its rounds"
    return f"at most by {percent(most.difference)} ({name}; {rounds})"


def notes(run: Sequence[Record]) -> list[str]:
    """What a reader must know before comparing."""
    found = []
    if "capability 8.0" not in run[0].device and any(r.target == "sm80" for r in run):
        found.append(f"SM80 code here ran on {run[0].device}: it is not an A100's result.")
    return found


def ceilings(run: Sequence[Record]) -> Grid:
    """What the device gave at best, by its datasheet and with each suite."""
    found = [record for record in run if record.operation == "ceiling" and record.times]
    beside = list(dict.fromkeys(record.suite for record in found))
    rows = [["ceiling", "datasheet", *(f"beside {name}" for name in beside)]]
    for name in dict.fromkeys(record.case["name"] for record in found):
        group = {record.suite: record for record in found if record.case["name"] == name}
        limit = limits(run).of(next(iter(group.values())))
        cells = [_reached(group[suite], limit) if suite in group else "" for suite in beside]
        sheet = "" if limit.datasheet is None else number(limit.datasheet)
        rows.append([f"{name}, {limit.unit}", sheet, *cells])
    return rows


def _reached(record: Record, limit: Limit) -> str:
    rate, share = limit.rate(record), limit.share(record, limit.datasheet)
    text = "" if rate is None else number(rate)
    return text if share is None else f"{text} ({percent(share)})"
