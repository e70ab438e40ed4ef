"""The pictures of a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from bench.records import Record
from bench.report.limits import Limits, limits
from bench.report.plots.clocks import over_jobs, over_time
from bench.report.plots.dots import by_case
from bench.report.plots.heat_map import ratios
from bench.report.plots.roofline import roofline
from bench.report.plots.series import families, over_length
from bench.report.plots.style import styles
from bench.report.tables import by_operation, labels, names
from bench.sampling import Sample

_LOOKS = "Bold lines are ours, dashed and hollow where they are SM80 code; thin lines are peers."


class Picture(NamedTuple):
    """A figure with what stands above and below it."""

    title: str
    caption: str
    figure: Figure


def of_run(run: Sequence[Record]) -> Iterator[Picture]:
    """What all suites of a run show together."""
    placed = [r for r in run if r.tflops and r.bytes_per_second and r.operation != "ceiling"]
    if placed:
        yield Picture(
            f"Roofline ({setting(placed)})",
            "Every measured row: what it reached over its arithmetic intensity, which counts the "
            "least traffic. Lines are what the card can do, by this run's own ceilings and by its "
            "datasheet.",
            roofline(placed, limits(run), styles(placed)),
        )


def setting(records: Sequence[Record]) -> str:
    """Return the dtypes and the card of records."""
    dtypes = {r.case.get("kv_dtype") or r.case.get("dtype"): None for r in records}
    card = records[0].device.partition(" (")[0]
    return f"{', '.join(filter(None, dtypes))}; {card}"


def _all(records: Sequence[Record]) -> str:
    shared, _ = names(records)
    return f"All cases: {shared}." if shared else ""


def of_suite(
    records: Sequence[Record], bounds: Limits, log: Sequence[Sample] = ()
) -> Iterator[Picture]:
    """What one suite's records fill.

    Args:
        records: of one suite, ceilings left out.
        bounds: the limits of the same run.
        log: clocks and power over the run, where the suite wrote them.
    """
    looks = styles(records)
    where = setting(records)
    for operation, group in by_operation(records).items():
        limit, name = bounds.of(group[0]), operation.capitalize()
        series, alone = families([record for record in group if limit.rate(record)])
        if series:
            title = f"{name}: {limit.unit} over length ({where})"
            yield Picture(title, _LOOKS, over_length(series, limit, looks))
        if alone:
            title = f"{name}: {limit.unit} by case ({where})"
            yield Picture(title, _all(alone), by_case(alone, limit, looks))
        timed = [record for record in group if record.times]
        if labels(timed, peers=True) and labels(timed, peers=False):
            caption = "Blue: ours is faster. Red: the peer is faster. Empty: one has no time."
            title = f"{name}: peer's time / ours ({where})"
            yield Picture(title, f"{caption} {_all(timed)}", ratios(timed))
    if len(log) > 1:
        caption = "Sampled while the suite was timed; shaded where the card held its clock back."
        yield Picture(f"Clock and power ({where})", caption, over_time(log))
    elif len({(r.case["name"], r.operation) for r in records if r.gpu}) > 1:
        caption = (
            "A dot is a job's median, its line reaches to the lowest clock and the highest power; "
            "shaded where the card held its clock back."
        )
        yield Picture(f"Clock and power ({where})", caption, over_jobs(records))
