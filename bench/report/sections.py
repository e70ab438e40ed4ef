"""Make what a report shows of a run: facts, peaks, and a section per suite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench import registry
from bench.peaks import Peak, Peaks, peaks
from bench.records import Record
from bench.report.tables import (
    by_operation,
    every,
    groups,
    memory,
    milliseconds,
    number,
    percent,
    rates,
    speeds,
    unmeasured,
)
from twin_attention.interop.rendering.tables import Grid

SPEEDS = "Speed-up over each peer: its time / ours (min to max over cases)"
_NEAR = 0.03  # what a cross-check may be off by


@dataclass(frozen=True)
class Section:
    title: str
    note: str
    records: list[Record]
    peaks: Peaks
    tables: dict[str, Grid]
    every: Grid


def sections(run: Sequence[Record]) -> list[Section]:
    found = []
    for name, group in groups(run, lambda record: record.suite).items():
        parts = by_operation(record for record in group if record.operation != "peak")
        if records := [record for part in parts.values() for record in part]:
            suite, own = registry.load(name), peaks(group)
            make = getattr(suite, "tables", None)
            tables = make(records) if make else _tables(records, suite.COLUMNS, own)
            tables = {heading: grid for heading, grid in tables.items() if len(grid) > 1}
            rows = every(records, suite.COLUMNS, own)
            _, title, note = registry.SUITES[name]
            found.append(Section(title, note, records, own, tables, rows))
    return found


def _tables(
    records: Sequence[Record], columns: Mapping[str, registry.Column], bounds: Peaks
) -> dict[str, Grid]:
    tables: dict[str, Grid] = {}
    for operation, group in by_operation(records).items():
        name, peak = operation.capitalize(), bounds.of(group[0])
        if any(peak.rate(record) for record in group):
            tables[f"{name}, {peak.unit}"] = rates(group, peak)
        tables[f"{name}, milliseconds (spread between rounds)"] = milliseconds(group)
        if "memory, MB" in columns:  # the suite is about it
            tables[f"{name}, MB added at the peak (saved by the forward)"] = memory(group)
    tables[SPEEDS] = speeds(records)
    tables["Without a time"] = unmeasured(records)
    return tables


def limits(card: Mapping[str, Any]) -> str:
    texts = {
        "multiprocessors": "{} SMs", "memory_gib": "{:.0f} GiB",
        "shared_memory": "{} bytes of shared memory a block", "sm_mhz": "up to {:.0f} MHz",
        "memory_mhz": "memory {:.0f} MHz", "watts": "power limit {:.0f} W", "driver": "driver {}",
    }  # fmt: skip
    known = {name: card[name] for name in texts if card.get(name) is not None}
    return ", ".join(texts[name].format(value) for name, value in known.items())


def statuses(records: Sequence[Record]) -> str:
    counts = Counter("measured" if r.status == "ok" else r.status for r in records)
    order = ("measured", "refused by parity", "failed", "out of memory", "skipped", "absent")
    return ", ".join(f"{counts[status]} {status}" for status in order if counts[status])


def facts(run: Sequence[Record]) -> dict[str, str]:
    days = sorted({record.date[:10] for record in run})
    found = {
        "GPU": run[0].device,
        "versions": ", ".join(f"{name} {text}" for name, text in run[0].versions.items()),
        "commit": run[0].commit,
        "date": days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}",
    }
    measured = [record for record in run if record.operation != "peak"]
    for whose, peers in (("our rows", False), ("peers' rows", True)):
        if text := statuses([record for record in measured if record.is_peer == peers]):
            found[whose] = text
    if run[0].card:
        found["card"] = limits(run[0].card)
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
    checked = [record for record in run if record.events is not None and record.span is not None]
    if checked:
        found["cross-check"] = (
            f"CUDA events differ by {percent(median(map(_difference, checked)))} from CUPTI's "
            f"span over {len(checked)} calls, {_most(checked)}"
        )
        libraries = [record for record in checked if record.label in ("FA2", "cuDNN")]
        if libraries:
            near = sum(_difference(record) <= _NEAR for record in libraries)
            found["cross-check"] += (
                f"; for FA2 and cuDNN by {percent(_NEAR)} or less over {near} of "
                f"{len(libraries)}, {_most(libraries)}"
            )
    return found


def _difference(record: Record) -> float:
    assert record.events is not None
    assert record.span is not None
    return abs(record.events / record.span.median - 1)


def _most(checked: Sequence[Record]) -> str:
    most = max(checked, key=_difference)
    assert most.span is not None
    name = f"{most.label}, {most.operation}, {most.case['name']}"
    rounds = f"{percent(most.span.spread)} between its rounds"
    return f"at most by {percent(_difference(most))} ({name}; {rounds})"


def notes(run: Sequence[Record]) -> list[str]:
    if "capability 8.0" in run[0].device or all(r.target != "sm80" for r in run):
        return []
    return [f"SM80 code here ran on {run[0].device}: it is not an A100's result."]


def peaks_table(run: Sequence[Record]) -> Grid:
    found = [record for record in run if record.operation == "peak" and record.times]
    beside = list(groups(found, lambda record: record.suite))
    rows = [["peak", "datasheet", *(f"beside {name}" for name in beside)]]
    for name, group in groups(found, lambda record: record.case["name"]).items():
        peak = peaks(run).of(group[0])
        cells = {record.suite: _reached(record, peak) for record in group}
        sheet = "" if peak.datasheet is None else number(peak.datasheet)
        rows.append([f"{name}, {peak.unit}", sheet, *(cells.get(suite, "") for suite in beside)])
    return rows


def _reached(record: Record, peak: Peak) -> str:
    rate, share = peak.rate(record), peak.share(record, peak.datasheet)
    text = "" if rate is None else number(rate)
    return text if share is None else f"{text} ({percent(share)})"
