"""Rates over the length of the keys: a panel for each family of cases, a line for each subject."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import NullLocator

from bench.records import Record
from bench.report.limits import Limit
from bench.report.plots.style import PANEL_HEIGHT, Style, legend, quiet, rule
from bench.report.tables import labels

_OF_LENGTH = ("name", "batch", "seq_q", "seq_kv", "lengths", "max_pages")


def length(record: Record) -> int:
    """Keys of the longest sequence."""
    return max(record.case.get("lengths") or [record.case["seq_kv"]])


def families(records: Sequence[Record]) -> tuple[list[list[Record]], list[Record]]:
    """Cases that differ in length alone, together; and those that are in no such family."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(_family(record), []).append(record)
    series = [group for group in groups.values() if _is_series(group)]
    alone = [r for group in groups.values() if not _is_series(group) for r in group]
    return sorted(series, key=_order), alone


def over_length(
    series: Sequence[Sequence[Record]], limit: Limit, looks: dict[str, Style], columns: int = 2
) -> Figure:
    """Draw a panel for each family of one operation, all on one scale."""
    rows = -(-len(series) // columns)
    size = (13, PANEL_HEIGHT * rows + 0.6 * rows + 0.6)
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)  # inches
    figure = Figure(figsize=size, layout=layout)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    rates = [limit.known_rate(record) for records in series for record in records]
    # Rates of single heads span orders; a bandwidth is read against its limit.
    logarithmic = limit.unit == "TFLOP/s" and max(rates) > 100 * min(rates)
    bounds = {f"measured {limit.name}": limit.measured, "datasheet": limit.datasheet}
    near = {name: rate for name, rate in bounds.items() if rate and rate < 2 * max(rates)}
    if logarithmic:
        near.pop("datasheet", None)  # too near the measured one on this scale
        panels[0].set_yscale("log")
    else:
        panels[0].set_ylim(0, 1.08 * max([*rates, *near.values()]))
    for axes, records in zip(panels, series, strict=False):
        _panel(axes, records, limit, looks)
        for name, rate in near.items():
            rule(axes, rate, name, dashed=name == "datasheet", below=logarithmic)
        quiet(axes, "y")
    for axes in panels[len(series) :]:
        axes.set_visible(False)
    for axes in panels[: len(series) : columns]:
        axes.set_ylabel(limit.unit, fontsize=8)
    legend(figure)
    return figure


def _panel(axes: Axes, records: Sequence[Record], limit: Limit, looks: dict[str, Style]) -> None:
    for label in labels(records):
        points = sorted((length(r), limit.known_rate(r)) for r in records if r.label == label)
        axes.plot(*zip(*points, strict=True), zorder=3 if looks[label]["linewidth"] > 2 else 2,
                  label=label, **looks[label])  # fmt: skip
    lengths = sorted(set(map(length, records)))
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, map(short, lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title(_title(records[0]), fontsize=9.5, loc="left")
    axes.set_xlabel("keys", fontsize=8)


def short(length: int) -> str:
    """A length as people say it.

    >>> short(512), short(32768)
    ('512', '32k')
    """
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def _family(record: Record) -> str:
    case = record.case
    rest = {name: value for name, value in case.items() if name not in _OF_LENGTH}
    if "lengths" in case:
        rest |= {"sequences": len(case["lengths"]), "wide": _has_wide_table(record)}
    return str(rest)


def _has_wide_table(record: Record) -> bool:
    """Whether the page table has room for more keys than the sequences have."""
    case = record.case
    return case["max_pages"] * case["page_size"] > length(record) + case["page_size"]


def _is_series(group: Sequence[Record]) -> bool:
    """More than one length, and no two cases of the same."""
    cases = {record.case["name"]: length(record) for record in group}
    return len(cases) > 1 and len(set(cases.values())) == len(cases)


def _order(group: Sequence[Record]) -> tuple:
    """Panels that differ in one thing beside each other, such as in the mask."""
    case = group[0].case
    return case["head_dim"], -case["heads_q"], -case["heads_kv"], case["dtype"], _family(group[0])


def _title(record: Record) -> str:
    """What the cases of a family share."""
    case = record.case
    words = [f"D {case['head_dim']}", f"{case['heads_q']}/{case['heads_kv']} heads"]
    if "lengths" in case:
        sequences = len(case["lengths"])
        words.append(f"{sequences} sequence{'s' if sequences > 1 else ''}")
        words += [f"{case['tokens']} tokens"] if (case["tokens"] or 1) > 1 else []
        words.append(f"pages of {case['page_size']}")
        words += ["wide table"] if _has_wide_table(record) else []
    words.append(case.get("kv_dtype") or case["dtype"])
    words += ["causal"] if case.get("causal") else []
    for name in ("window_size", "softcap"):
        words += [f"{name} {case[name]}"] if case.get(name) is not None else []
    return ", ".join(words)
