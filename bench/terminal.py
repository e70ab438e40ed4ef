"""What a suite's run prints in the end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.table import Table

from bench.records import Record


def terminal_table(records: Sequence[Record]) -> Table:
    """A row for each record; its time beside that of the case's fastest peer."""
    table = Table("case", "operation", "implementation")
    for title in ("ms", "spread", "host ms", "TFLOP/s", "TB/s", "best peer / this"):
        table.add_column(title, justify="right")
    for (name, operation), group in groupby(records, lambda r: (r.case["name"], r.operation)):
        rows = list(group)
        peers = [r.times.median for r in rows if r.is_peer and r.times is not None]
        for record in rows:
            if record.times is None:
                style = "dim" if record.status == "absent" else "red"
                table.add_row(name, operation, record.label, record.status, style=style)
                continue
            cells = [
                f"{record.times.median:.4f}",
                f"{record.times.spread:.1%}",
                "" if record.host is None else f"{record.host.median:.3f}",
                "" if record.tflops is None else f"{record.tflops:.1f}",
                "" if record.bytes_per_second is None else f"{record.bytes_per_second / 1e12:.2f}",
                f"{min(peers) / record.times.median:.2f}" if peers else "",
            ]
            table.add_row(name, operation, record.label, *cells)
        table.add_section()
    return table
