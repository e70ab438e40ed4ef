"""What a suite's run prints in the end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.table import Table
from rich.text import Text

from bench.records import Record
from bench.report.limits import limits


def terminal_table(records: Sequence[Record]) -> Table:
    """A row for each record but the absent ones; its time beside that of the fastest peer."""
    absent = sum(record.status == "absent" for record in records)
    caption = f"{absent} absent: a peer is not installed, or does not do the case"
    table = Table("case", "operation", "implementation", caption=caption if absent else None)
    for title in ("ms", "spread", "host ms", "TFLOP/s", "TB/s", "of ceiling", "best peer / this"):
        table.add_column(title, justify="right")
    bounds = limits(records)
    for (name, operation), group in groupby(records, lambda r: (r.case["name"], r.operation)):
        rows = list(group)
        peers = [r.times.median for r in rows if r.is_peer and r.times is not None]
        for record in rows:
            if record.status == "absent":
                continue
            cells = [record.status]
            if record.times is not None:
                host, flops, rate = record.host, record.tflops, record.bytes_per_second
                limit = bounds.of(record)
                share = limit.share(record, limit.measured)
                cells = [
                    f"{record.times.median:.4f}",
                    f"{record.times.spread:.1%}",
                    "" if host is None else f"{host.median:.3f}",
                    "" if flops is None else f"{flops:.1f}",
                    "" if rate is None else f"{rate / 1e12:.2f}",
                    "" if share is None else f"{share:.1%}",
                    f"{min(peers) / record.times.median:.2f}" if peers else "",
                ]
            style = "" if record.status == "ok" else "red"
            table.add_row(*map(Text, (name, operation, record.label, *cells)), style=style)
        table.add_section()
    return table
