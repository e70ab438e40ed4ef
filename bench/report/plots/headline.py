"""The few pictures that stand for a run: what a reader of the summary sees first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.records import Record
from bench.report.limits import limits
from bench.report.plots import Picture, setting
from bench.report.plots.dots import by_case
from bench.report.plots.series import families, over_length
from bench.report.plots.style import styles
from bench.report.tables import SHOWN

_PANELS = 3  # in a row


def headline(run: Sequence[Record]) -> Iterator[tuple[str, Picture]]:
    """Draw causal flash attention over length and decodes of batches, each with a short name."""
    shown = [record for record in run if record.implementation in SHOWN]
    for operation in ("forward", "backward"):
        group = [r for r in shown if (r.suite, r.operation) == ("flash", operation)]
        limit = limits([r for r in run if r.suite == "flash"]).matmul
        series, _ = families([r for r in group if r.case["causal"] and limit.rate(r)])
        if series:
            title = f"Flash attention {operation}, causal ({setting(group)})"
            figure = over_length(series, limit, styles(group), _PANELS)
            yield operation, Picture(title, "", figure)
    limit = limits([r for r in run if r.suite == "kvcache"]).read
    group = [r for r in shown if r.suite == "kvcache" and _is_plain(r) and limit.rate(r)]
    if group:
        title = f"Paged decode of one token ({setting(group)})"
        yield "decode", Picture(title, "", by_case(group, limit, styles(group)))


def _is_plain(record: Record) -> bool:
    """Return True for a batch's decode of one token, in 16 bits, at head size 128."""
    case = record.case
    return not case["name"].startswith("sweep") and (
        case["tokens"],
        case["kv_dtype"],
        case["head_dim"],
    ) == (1, None, 128)
