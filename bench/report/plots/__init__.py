"""Choose the pictures of a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from bench.peaks import Peak, Peaks, peaks
from bench.records import Record
from bench.report.plots.rates import by_case, over_length, split_series
from bench.report.plots.ratios import ratios
from bench.report.plots.style import styles
from bench.report.plots.training import over_a_step, peaks_by_case, steps
from bench.report.tables import SHOWN, groups, labels, names

_LOOKS = "Bold lines are ours, dashed and hollow where they are SM80 code; thin lines are peers."
_READ = (
    "The measured read is torch's sum of 1 GiB in the same run: a reference, no bound. A decode "
    "that reads more spreads the start and the end of its kernel over more bytes, so its points "
    "may lie right of the line. Cache hits play no part: every byte is counted once, and the L2 "
    "cache is flushed before each call."
)


class Picture(NamedTuple):
    title: str
    caption: str
    figure: Figure


def of_suite(records: Sequence[Record], bounds: Peaks) -> Iterator[Picture]:
    if records[0].suite in ("end-to-end", "memory"):
        yield from (picture for _, picture in _training(records))
        return
    looks, where = styles(records), _setting(records)
    for operation, group in groups(records, lambda r: r.operation).items():
        peak, name = bounds.of(group[0]), operation.capitalize()
        series, alone = split_series([record for record in group if peak.rate(record)])
        if series:
            title = f"{name}: {peak.unit} over length ({where})"
            yield Picture(title, _LOOKS, over_length(series, peak, looks))
        if alone:
            title = f"{name}: {peak.unit} by case ({where})"
            caption = " ".join(filter(None, (_all(alone), _above(alone, peak))))
            yield Picture(title, caption, by_case(alone, peak, looks))
        timed = [record for record in group if record.times]
        if labels(timed, peers=True) and labels(timed, peers=False):
            caption = "Blue: ours is faster. Red: the peer is faster. Empty: one has no time."
            title = f"{name}: peer's time / ours ({where})"
            yield Picture(title, f"{caption} {_all(timed)}", ratios(timed))


def _training(records: Sequence[Record]) -> Iterator[tuple[str, Picture]]:
    where = _setting(records)
    if records[0].suite == "end-to-end":
        caption = "Medians of each phase, timed by itself; the number is that of the whole step."
        yield "steps", Picture(f"Training steps ({where})", caption, steps(records))
        return
    yield "memory", Picture(f"Memory at the peak of a step ({where})", "", peaks_by_case(records))
    if figure := over_a_step(records):
        caption = "From left to right: of torch allocations in order; of JAX its programs."
        yield "timeline", Picture(f"Memory over a step ({where})", caption, figure)


def headline(run: Sequence[Record]) -> Iterator[tuple[str, Picture]]:
    """Draw a summary's pictures: causal flash attention, batched decodes, and training."""
    shown = [record for record in run if record.implementation in SHOWN]
    for operation in ("forward", "backward"):
        group = [r for r in shown if (r.suite, r.operation) == ("flash", operation)]
        peak = peaks([r for r in run if r.suite == "flash"]).matmul
        series, _ = split_series([r for r in group if r.case["causal"] and peak.rate(r)])
        if series:
            title = f"Flash attention {operation}, causal ({_setting(group)})"
            yield operation, Picture(title, "", over_length(series, peak, styles(group), 3, True))
    peak = peaks([r for r in run if r.suite == "kvcache"]).read
    plain = {"tokens": 1, "kv_dtype": None, "head_dim": 128}
    group = [
        record
        for record in shown
        if record.suite == "kvcache"
        and not record.case["name"].startswith("sweep")
        and plain.items() <= record.case.items()
        and peak.rate(record)
    ]
    if group:
        title = f"Paged decode of one token ({_setting(group)})"
        picture = by_case(group, peak, styles(group))
        yield "decode", Picture(title, _above(group, peak), picture)
    for suite in ("end-to-end", "memory"):
        if trained := [r for r in run if r.suite == suite and r.operation != "peak"]:
            yield from _training(trained)


def _setting(records: Sequence[Record]) -> str:
    dtypes = {r.case.get("kv_dtype") or r.case.get("dtype"): None for r in records}
    card = records[0].device.partition(" (")[0]
    return f"{', '.join(filter(None, dtypes))}; {card}"


def _all(records: Sequence[Record]) -> str:
    shared, _ = names(records)
    return f"All cases: {shared}." if shared else ""


def _above(records: Sequence[Record], peak: Peak) -> str:
    """Return why a decode may read faster than the measured peak, if one does."""
    above = peak.name == "read" and any((peak.share(r, peak.measured) or 0) > 1 for r in records)
    return _READ if above else ""
