"""Make tables from records."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from bench.peaks import Peak, Peaks, peaks
from bench.records import Record
from bench.registry import Cells, Column, cells
from twin_attention.interop.parity.records import problem_text
from twin_attention.interop.rendering.tables import Grid

Item = TypeVar("Item")

# What a summary shows: the twins and the most relevant peers.
SHOWN = {
    "torch gluon", "jax mosaic", "torch triton", "jax triton", "FA2", "FA3", "FA4",
    "jax FA3", "cuDNN", "tokamax Mosaic", "FlashInfer", "FA2 dense", "cuDNN dense",
}  # fmt: skip
_STATUSES = {"out of memory": "OOM", "failed": "error"}
_RATIOS = ("eager", "SDPA", "FA2")  # peers whose time over each implementation's is a column


def groups(records: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    found: dict[Any, list[Item]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found


def runs(records: Iterable[Record]) -> list[list[Record]]:
    """Return comparable groups; of the same measurement the last record counts."""
    latest = {record.key: record for record in records}
    return list(groups(latest.values(), lambda record: record.run).values())


def by_operation(records: Iterable[Record]) -> dict[str, list[Record]]:
    return groups(records, lambda record: record.operation)


def by_case(records: Iterable[Record]) -> dict[str, dict[str, Record]]:
    cases = groups(records, lambda record: record.case["name"])
    return {name: {record.label: record for record in group} for name, group in cases.items()}


def labels(records: Iterable[Record], peers: bool | None = None) -> list[str]:
    """Return labels of all, peers or ours: ours first, then by number of times."""
    chosen = groups((r for r in records if peers in (None, r.is_peer)), lambda r: r.label)
    timed = {label: sum(r.times is not None for r in group) for label, group in chosen.items()}
    return sorted(chosen, key=lambda label: (chosen[label][0].is_peer, -timed[label]))


def ratio(row: dict[str, Record], label: str, peer: str) -> float | None:
    """Return a peer's time over ours, above 1 if ours is faster; None if one is missing."""
    pair = [row[name].times for name in (label, peer) if name in row]
    if len(pair) < 2 or pair[0] is None or pair[1] is None:
        return None
    return pair[1].median / pair[0].median


def status(record: Record) -> str:
    """Return "ok", "OOM", or "error" or "absent" with the reason."""
    text = _STATUSES.get(record.status, record.status)
    return f"{text} ({record.message})" if text in ("error", "absent") else text


def ratio_text(row: dict[str, Record], label: str, other: str | None) -> str:
    if other is None or other not in row or row[other].status == "absent":
        return ""
    found = ratio(row, label, other)
    return status(row[other]) if found is None else f"{found:.2f}"


def best_peer(row: dict[str, Record]) -> str | None:
    times = {label: r.times.median for label, r in row.items() if r.is_peer and r.times}
    return min(times, key=lambda label: times[label], default=None)


def problem(case: dict[str, Any]) -> str:
    if "head_dim" not in case:
        return case["name"]
    text = re.sub(r"\b(S|H|T)q(\d+) \1kv\2\b", r"\1\2", problem_text(case))
    if "max_pages" in case and case["max_pages"] == -(-max(case["lengths"]) // case["page_size"]):
        text = re.sub(r"pages \d+x", "pages ", text)  # as many as the sequence needs
    text = text.replace("pages ", "pages=")
    # The number of shared first pages is no field of a case.
    shared = re.fullmatch(r"cascade-.*-(\d+)-pages", case["name"])
    return f"{text} shared_pages={shared[1]}" if shared else text


def names(records: Iterable[Record]) -> tuple[str, dict[str, str]]:
    words = {r.case["name"]: re.split(r" (?![^(]*\))", problem(r.case)) for r in records}
    shared = [word for word in next(iter(words.values())) if all(word in w for w in words.values())]
    if len(words) == 1:
        return "", {name: " ".join(found) for name, found in words.items()}
    apart = {name: [word for word in found if word not in shared] for name, found in words.items()}
    return " ".join(shared), {name: " ".join(found) or "-" for name, found in apart.items()}


def number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def percent(value: float) -> str:
    return f"{value:.1%}"


def rates(records: Sequence[Record], peak: Peak) -> Grid:
    return _pivot(records, lambda r: r.status if r.times is None else _text(peak.rate(r)))


def milliseconds(records: Sequence[Record]) -> Grid:
    return _pivot(
        records,
        lambda r: f"{number(r.times.median)} ({percent(r.times.spread)})" if r.times else r.status,
    )


def memory(records: Sequence[Record]) -> Grid:
    def cell(record: Record) -> str:
        if record.memory is None:  # of JAX it may be unknown
            return "" if record.times else record.status
        saved = "" if record.held is None else f" ({number(record.held / 1e6)})"
        return number(record.memory / 1e6) + saved

    return _pivot(records, cell)


def speeds(records: Sequence[Record]) -> Grid:
    """Return a peer's time over ours, from minimum to maximum over the cases; a column per peer."""
    timed = [record for record in records if record.times and not record.is_yardstick]
    peers = labels(timed, peers=True)
    rows = [["operation", "implementation", "best peer", *peers]]
    if not peers:
        return rows
    for operation, group in by_operation(timed).items():
        cases = by_case(group).values()
        for label in labels(group, peers=False):
            best = [ratio(row, label, peer) for row in cases if (peer := best_peer(row))]
            columns = [best] + [[ratio(row, label, peer) for row in cases] for peer in peers]
            rows.append([operation, label, *map(_range, columns)])
    return rows


def every(records: Sequence[Record], columns: Mapping[str, Column], bounds: Peaks) -> Grid:
    cases = {name: by_case(group) for name, group in by_operation(records).items()}
    rows = []
    for record in records:
        own = cells(columns, record)
        shared = _shared(record, cases[record.operation][record.case["name"]], bounds.of(record))
        several = {"pass": record.operation} if len(cases) > 1 else {}
        rows.append(several | {"implementation": record.label} | own | (shared | own))
    return to_grid(rows)


def to_grid(rows: Sequence[Cells]) -> Grid:
    titles = dict.fromkeys(title for row in rows for title in row)
    used = [title for title in titles if any(row.get(title) not in (None, "") for row in rows)]
    return [used, *([_text(row.get(title)) for title in used] for row in rows)]


def brief(records: Sequence[Record]) -> tuple[Grid, list[str]]:
    """Return each record's time, rates and fastest peer's ratio, and each row's style."""
    bounds, rows, styles = peaks(records), [], []
    for problem, group in groups(records, lambda r: (r.case["name"], r.operation)).items():
        rows.append([" ".join(problem), *[""] * 7])
        styles.append("bold")
        fastest = min((r.times.median for r in group if r.is_peer and r.times), default=None)
        for record in group:
            times, host, rate = record.times, record.host, record.bytes_per_second
            peak = bounds.of(record)
            numbers = [
                record.status if times is None else f"{times.median:.4f}",
                "" if times is None else percent(times.spread),
                "" if host is None else f"{host.median:.3f}",
                "" if record.tflops is None else f"{record.tflops:.1f}",
                "" if rate is None else f"{rate / 1e12:.2f}",
                _percent(peak.share(record, peak.measured)) or "",
                f"{fastest / times.median:.2f}" if fastest and times else "",
            ]
            rows.append([f"  {record.label}", *numbers])
            styles.append("" if record.status == "ok" else "red")
    titles = ["implementation", "ms", "spread", "host\nms", "TFLOP/s", "TB/s", "of\npeak",
              "best\npeer\n/ this"]  # fmt: skip
    return [titles, *rows], styles


def unmeasured(records: Sequence[Record]) -> Grid:
    """Return what has no time, and why; equal reasons of several cases share a row."""
    found = groups(
        (record for record in records if record.times is None),
        lambda r: (r.operation, r.label, r.status, r.message or ""),
    )
    rows = []
    for reason, group in found.items():
        names = [record.case["name"] for record in group]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        rows.append([*reason, ", ".join(names[:3]) + more])
    return [["operation", "implementation", "status", "message", "cases"], *rows]


def to_csv(records: Iterable[Record]) -> str:
    """Return a row per record and a column per field, but for the long timelines of memory."""
    rows = [_flat(asdict(replace(record, timeline=None))) for record in records]
    buffer = io.StringIO()
    fields = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(buffer, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()


def _flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}_")
        elif isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            flat[prefix + name] = "; ".join(value)
        else:
            flat[prefix + name] = value
    return flat


def _shared(record: Record, row: dict[str, Record], peak: Peak) -> Cells:
    times, span, host, gpu = record.times, record.span, record.host, record.gpu or {}
    peer = best_peer(row)
    best = None if peer is None else ratio(row, record.label, peer)
    ratios = {peer: ratio(row, record.label, peer) for peer in _RATIOS}
    against = None if span is None or record.events is None else record.events / span.median - 1
    return {
        "ms": None if times is None else times.median,
        "spread": None if times is None else percent(times.spread),
        peak.unit: peak.rate(record),
        f"of measured {peak.name}": _percent(peak.share(record, peak.measured)),
        "of datasheet": _percent(peak.share(record, peak.datasheet)),
        "best peer / this": None if best is None else f"{best:.2f} ({peer})",
        **{f"{peer} / this": None if r is None else f"{r:.2f}" for peer, r in ratios.items()},
        "span, ms": None if span is None else span.median,
        "events - span": _percent(against),
        "host, us": None if host is None else 1e3 * host.median,
        "kernels": None if times is None else str(len(record.kernels)),
        "memory, MB": None if record.memory is None else record.memory / 1e6,
        "error / budget": record.error,
        "SM clock, MHz": gpu.get("sm_mhz"),
        "power, W": gpu.get("watts"),
        "status": record.status,
    }


def _percent(value: float | None) -> str | None:
    return None if value is None else percent(value)


def _pivot(records: Sequence[Record], cell: Callable[[Record], str]) -> Grid:
    titles = labels(record for record in records if record.status != "absent")
    shared, apart = names(records)
    rows = [[f"case (all {shared})" if shared else "case", *titles]]
    for name, row in by_case(records).items():
        rows.append([apart[name], *(cell(row[t]) if t in row else "" for t in titles)])
    return rows


def _range(found: Iterable[float | None]) -> str:
    known = [value for value in found if value is not None]
    return f"{min(known):.2f} to {max(known):.2f}" if known else ""


def _text(value: str | float | None) -> str:
    if value is None:
        return ""
    return number(value) if isinstance(value, float) else str(value)
