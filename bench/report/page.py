"""The report as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from string import Template

from bench.records import Record
from bench.report.markdown import notes, provenance, tables
from bench.report.plots import figures
from bench.report.tables import Grid, number, numeric, runs
from interop.parity.plot import to_svg
from interop.parity.records import problem_text


def to_html(title: str, records: Sequence[Record]) -> str:
    """Every run with its plots and tables, then all records in a table to sort and filter."""
    shared, own = files("interop.parity"), files("bench.report")
    compared = runs(records)
    rows = [record for run in compared for record in run]
    lost = sum(record.status != "ok" for record in rows)
    return Template(own.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        style=shared.joinpath("page.css").read_text(encoding="utf-8"),
        script=shared.joinpath("page.js").read_text(encoding="utf-8"),
        title=escape(title),
        badge="failed" if lost else "passed",
        summary=f"{len(rows) - lost} measured" + (f", {lost} without a time" if lost else ""),
        runs="\n".join(part for run in compared for part in _run(run)),
        records="\n".join(map(_record, rows)),
    )


def _run(run: Sequence[Record]) -> Iterator[str]:
    yield f"<h2>{escape(run[0].device)}</h2>"
    yield f"<p>{escape(provenance(run))}</p>"
    yield from (f"<p><b>{escape(note)}</b></p>" for note in notes(run))
    for heading, figure in figures(run).items():
        yield f"<h3>{escape(heading)}</h3>\n<figure>\n{to_svg(figure)}</figure>"
    for heading, grid in tables(run):
        yield f"<h3>{escape(heading)}</h3>\n{_table(grid)}"


def _table(grid: Grid) -> str:
    styles = [' class="number"' if number else "" for number in numeric(grid)]

    def row(tag: str, texts: Sequence[str]) -> str:
        cells = (f"<{tag}{style}>{escape(t)}" for style, t in zip(styles, texts, strict=True))
        return f"<tr>{''.join(cells)}</tr>"

    head, *body = grid
    return (
        f'<div class="scroll"><table>\n<thead>{row("th", head)}</thead>\n'
        f"<tbody>\n{chr(10).join(row('td', texts) for texts in body)}\n</tbody></table></div>"
    )


def _record(record: Record) -> str:
    numbers = [""] * 6
    if (times := record.times) is not None:
        numbers = [_number(value) for value in (times.median, times.p20, times.p80)]
        numbers += [f"{times.spread:.1%}", _number(record.tflops)]
        numbers.append(_number(record.bytes_per_second and record.bytes_per_second / 1e9))
    texts = [record.case["name"], problem_text(record.case), record.operation, record.label]
    kernels = "".join(f"<li>{escape(name)}" for name in record.kernels)
    opened = f"<details><summary>{len(record.kernels)}</summary><ol>{kernels}</ol></details>"
    status = record.status if record.message is None else f"{record.status}: {record.message}"
    return (
        f'<tr class="{"passed" if record.status == "ok" else "failed"}">'
        + "".join(f"<td>{escape(text)}" for text in texts)
        + "".join(f'<td class="number">{text}' for text in numbers)
        + f"<td>{escape(status)}<td>{opened if kernels else ''}<td>{escape(record.commit)}</tr>"
    )


def _number(value: float | None) -> str:
    return "" if value is None else number(value)
