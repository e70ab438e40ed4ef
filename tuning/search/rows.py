"""Go through rows of a table: survey, search, write what is better."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from interop.parity.cases import Case
from tuning.search.cases import cases, reader
from tuning.search.search import Found, Run, Timer, describe, search
from tuning.search.space import candidates
from tuning.search.table import ConfigTable, Row
from twin_attention.targets.kernels import KernelConfig

if TYPE_CHECKING:
    from tuning.search.survey import Survey


class Surveyor(Protocol):
    def __call__(
        self, row: Row, case: Case, configs: Sequence[KernelConfig], /
    ) -> Iterable[Survey]:
        """Compile configurations of a row for its case, and survey them in order."""
        ...


@dataclass(frozen=True)
class Tools:
    """What tuning needs of a compiler and a GPU.

    Attributes:
        survey: compiles a row's configurations.
        calls: puts up a row's case; what it returns makes a configuration's call (see `search`).
        timer: times calls against each other.
        note: what the table is to say of what was found.
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
    """Tune rows one after the other; what gets better is written at once.

    Args:
        table: what the rows are of; changes with them.
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
    """Print what compiling leaves of each row's space; the present configuration comes first."""
    for row in rows:
        case, configs = _space(table, target, row)
        shown = Table(
            "tile, warps, stages", title=f"{row}: {len(configs) - 1} configurations that may fit",
            title_justify="left", box=box.SIMPLE_HEAD,
        )  # fmt: skip
        for heading in ("registers", "spilled", "shared", "blocks"):
            shown.add_column(heading, justify="right")
        shown.add_column("verdict")
        surveys = survey(row, case, configs)
        fit = 0
        for entry in track(surveys, str(row), len(configs), console=console, transient=True):
            taken, present = entry.resources, entry.config == row.config
            fit += entry.reason is None and not present
            numbers = [""] * 4 if taken is None else [
                str(taken.registers), f"{taken.spill_stores}/{taken.spill_loads}",
                str(taken.shared), str(taken.occupancy),
            ]  # fmt: skip
            shown.add_row(
                describe(entry.config), *numbers,
                escape(entry.reason or ("fit, present" if present else "fit")),
                style="dim" if entry.reason else "",
            )  # fmt: skip
        console.print(shown)
        console.print(f"{row}: {fit} of {len(configs) - 1} are fit to run", highlight=False)


def case_of(table: ConfigTable, row: Row) -> Case:
    """The case that stands for a row.

    Raises:
        LookupError: none of the kernel's cases reads the row.
    """
    for case in cases(row.kernel):
        if table.index_of(row.kernel, reader(row.kernel, case.spec)) == row.index:
            return case
    raise LookupError(f"{row}: expected a case in tuning/search/cases.py that reads it, got none")


def distinct(surveys: Iterable[Survey], present: KernelConfig) -> Iterator[KernelConfig]:
    """The configurations worth a launch, one of those that make the same code."""
    seen = set()
    for entry in surveys:
        if entry.reason is None and entry.config != present and entry.code not in seen:
            yield entry.config
        seen.add(entry.code)


def _space(table: ConfigTable, target: str, row: Row) -> tuple[Case, list[KernelConfig]]:
    """A row's case and all of its configurations, the present one first."""
    case = case_of(table, row)
    return case, [row.config, *candidates(row.kernel, case.spec, row.config, target)]


def times(found: Found) -> str:
    """Both times of what was found."""
    return f"{found.times.median:.4f} ms, before {found.before.median:.4f} ms"
