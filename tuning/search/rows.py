"""Go through rows of a table: survey, search, and write better configurations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.progress import track

from interop.parity.cases import Case
from interop.rendering.tables import to_terminal
from tuning.search.cases import cases, reader
from tuning.search.search import Found, Run, Timer, describe, search
from tuning.search.space import candidates
from tuning.search.survey import Survey
from tuning.search.table import ConfigTable, Row
from twin_attention.targets.kernels import KernelConfig

Surveyor = Callable[[Row, Case, Sequence[KernelConfig]], Iterable[Survey]]
_TITLES = ["tile, warps, stages", "registers", "spilled", "shared", "blocks", "verdict"]


class Tools(NamedTuple):
    """The functions that use a compiler and a GPU.

    Attributes:
        survey: compiles a row's configurations, in order.
        calls: puts up a row's case; the result makes a configuration's call (see `search`).
        timer: times calls against each other.
        note: the table's comment on a found configuration.
    """

    survey: Surveyor
    calls: Callable[[Row, Case], Callable[[KernelConfig], Run]]
    timer: Timer
    note: Callable[[Found], str]


def tune(
    table: ConfigTable,
    target: str,
    rows: Sequence[Row],
    tools: Tools,
    output: Path,
    limit_seconds: float,
    console: Console,
) -> None:
    """Tune rows one after the other and write each gain at once.

    Args:
        table: holds the rows and changes with them.
        target: whose code is tuned, "sm80" or "sm90".
        output: the file to write.
        limit_seconds: for all rows; each has an even share of what is left.
    """
    end = time.monotonic() + limit_seconds
    for number, row in enumerate(rows):
        now = time.monotonic()
        deadline = now + (end - now) / (len(rows) - number)
        case, configs = _space(table, target, row)
        console.print(f"[bold]{row}[/], {case.name}: {describe(row.config)} now", highlight=False)
        surveys = track(
            tools.survey(row, case, configs), "searching", len(configs), console=console,
            transient=True,
        )  # fmt: skip
        found = search(
            row.config, distinct(surveys, row.config), tools.calls(row, case), tools.timer,
            deadline, partial(console.print, highlight=False, markup=False),
        )  # fmt: skip
        if found is None:
            console.print("stays: nothing is faster by more than the noise", highlight=False)
            continue
        table.write(row, found.config, tools.note(found))
        output.write_text(table.text)
        console.print(f"now {describe(found.config)}: {times(found)}", highlight=False)


def show(
    table: ConfigTable, target: str, rows: Sequence[Row], survey: Surveyor, console: Console
) -> None:
    """Print what compiling leaves of each row's space, the present configuration first."""
    for row in rows:
        case, configs = _space(table, target, row)
        grid, styles, fit = [_TITLES], [], 0
        surveys = survey(row, case, configs)
        for entry in track(surveys, str(row), len(configs), console=console, transient=True):
            taken, present = entry.resources, entry.config == row.config
            fit += entry.reason is None and not present
            numbers = [""] * 4 if taken is None else [
                str(taken.registers), f"{taken.spill_stores}/{taken.spill_loads}",
                str(taken.shared), str(taken.occupancy),
            ]  # fmt: skip
            verdict = entry.reason or ("fit, present" if present else "fit")
            grid.append([describe(entry.config), *numbers, verdict])
            styles.append("dim" if entry.reason else "")
        title = f"{row}: {len(configs) - 1} configurations that may fit"
        console.print(
            to_terminal(grid, styles, title=title, title_justify="left", box=box.SIMPLE_HEAD)
        )
        console.print(f"{row}: {fit} of {len(configs) - 1} are fit to run", highlight=False)


def case_of(table: ConfigTable, row: Row) -> Case:
    """Return the case that stands for a row.

    Raises:
        LookupError: none of the kernel's cases reads the row.
    """
    for case in cases(row.kernel):
        if table.index_of(row.kernel, reader(row.kernel, case.spec)) == row.index:
            return case
    raise LookupError(f"{row}: expected a case in tuning/search/cases.py that reads it, got none")


def distinct(surveys: Iterable[Survey], present: KernelConfig) -> Iterator[KernelConfig]:
    """Return the configurations worth a launch, one of those that make the same code."""
    seen = set()
    for entry in surveys:
        if entry.reason is None and entry.config != present and entry.code not in seen:
            yield entry.config
        seen.add(entry.code)


def _space(table: ConfigTable, target: str, row: Row) -> tuple[Case, list[KernelConfig]]:
    """Return a row's case and all of its configurations, the present one first."""
    case = case_of(table, row)
    return case, [row.config, *candidates(row.kernel, case.spec, row.config, target)]


def times(found: Found) -> str:
    """Return both times of a found configuration."""
    return f"{found.times.median:.4f} ms, before {found.before.median:.4f} ms"
