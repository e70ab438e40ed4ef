"""Write a table of text as markdown, as HTML, or to a terminal."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

Grid = list[list[str]]  # a table's cells, titles first

_NUMBER = re.compile(r"[-+]?(inf|[\d.]+)(%|\s|$)")
# Options of a progress bar. A large case outlasts the default of 30 seconds.
PROGRESS: dict[str, Any] = {"transient": True, "speed_estimate_period": 600}
# Options of a table as wide as its cells.
COMPACT: dict[str, Any] = {
    "box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False, "show_edge": False,
}  # fmt: skip
NARROW: dict[str, Any] = {"padding": 0}  # one space between columns


class Cell(NamedTuple):
    """A cell of an HTML table: a class of page.css ("failed"), and lines that a click opens."""

    text: str
    look: str = ""
    details: Sequence[str] = ()


def numeric(grid: Sequence[Sequence[str]]) -> list[bool]:
    """Return for each column whether a cell in it begins with a number."""
    columns = zip(*grid, strict=True)
    return [any(_NUMBER.match(cell) for cell in column[1:]) for column in columns]


def to_markdown(grid: Grid) -> str:
    """Return the table in markdown, numbers to the right."""
    lines = [[cell.replace("|", "\\|") for cell in row] for row in grid]
    lines.insert(1, ["---:" if number else "---" for number in numeric(grid)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def to_html(
    titles: Sequence[str],
    rows: Iterable[Sequence[str | Cell]],
    looks: Sequence[str] = (),
    filtered: bool = False,
) -> str:
    """Return an HTML table that sorts by a clicked column; `looks` has each row's class."""
    body = [[Cell(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    numbers = numeric([titles, *([cell.text for cell in row] for row in body)])
    head = "".join(
        f'<th class="number">{escape(title)}' if number else f"<th>{escape(title)}"
        for title, number in zip(titles, numbers, strict=True)
    )
    lines = [
        (f'<tr class="{look}">' if look else "<tr>")
        + "".join(_td(cell, number) for cell, number in zip(row, numbers, strict=True))
        for row, look in zip(body, looks or [""] * len(body), strict=True)
    ]
    return (
        '<input type="search" placeholder="Filter rows" aria-label="Filter">\n' * filtered
        + f'<div class="scroll{" long" * filtered}" tabindex="0"><table>\n'
        + f"<thead><tr>{head}</tr></thead>\n"
        + "\n".join(["<tbody>", *lines, "</tbody></table></div>"])
    )


def _td(cell: Cell, number: bool) -> str:
    look = " ".join(filter(None, ("number" * number, cell.look)))
    text = escape(cell.text)
    if cell.details:
        items = "".join(f"<li>{escape(line)}" for line in cell.details)
        text = f"<details><summary>{text}</summary><ol>{items}</ol></details>"
    return f'<td class="{look}">{text}' if look else f"<td>{text}"


def console_of(log_width: int) -> Console:
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = log_width
    return console


def to_terminal(grid: Grid, styles: Sequence[str] = (), **options: Any) -> Table:
    """Return the table for a `rich` console, with each row's style."""
    table = Table(**COMPACT | options)
    for title, number in zip(grid[0], numeric(grid), strict=True):
        table.add_column(title, justify="right" if number else "left", overflow="fold")
    for row, style in zip(grid[1:], styles or [""] * len(grid[1:]), strict=True):
        table.add_row(*map(Text, row), style=style)
    return table


def progress_columns() -> tuple:
    """Return the columns of a progress bar whose steps take seconds to minutes."""
    return (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left"),
    )  # fmt: skip
