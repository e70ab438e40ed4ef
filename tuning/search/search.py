"""Search each row of a table: survey its space, time the survivors, write a better one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich import box
from rich.console import Console
from rich.progress import track

from bench.records import Times
from tuning.search.cases import TimedCase, cases, reader
from tuning.search.space import candidates
from tuning.search.survey import Survey
from tuning.search.table import ConfigTable, Row
from twin_attention.interop.rendering.tables import to_terminal
from twin_attention.targets.kernels import KernelConfig

if TYPE_CHECKING:
    from bench.timing import Timing

Run = Callable[[], Any]
Surveyor = Callable[[Row, TimedCase, Sequence[KernelConfig]], Iterable[Survey]]
Timer = Callable[[Mapping[KernelConfig, Run]], "dict[KernelConfig, Timing]"]


class Tools(NamedTuple):
    """The functions that use a compiler and a GPU; `note` comments on a found configuration."""

    survey: Surveyor
    calls: Callable[[Row, TimedCase], Callable[[KernelConfig], Run]]
    timer: Timer
    note: Callable[[Found], str]


class Found(NamedTuple):
    config: KernelConfig
    times: Times
    before: Times

    def __str__(self) -> str:
        return f"{self.times.median:.4f} ms, before {self.before.median:.4f} ms"


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

    limit_seconds: for all rows; each has an even share of what is left.
    """
    say = partial(console.print, highlight=False)
    end = time.monotonic() + limit_seconds
    for number, row in enumerate(rows):
        now = time.monotonic()
        deadline = now + (end - now) / (len(rows) - number)
        case, configs = _space(table, target, row)
        say(f"[bold]{row}[/], {case.name}: {describe(row.config)} now")
        surveys = tools.survey(row, case, configs)
        surveys = track(surveys, "searching", len(configs), console=console, transient=True)
        found = search(
            row.config, distinct(surveys, row.config), tools.calls(row, case), tools.timer,
            deadline, partial(say, markup=False),
        )  # fmt: skip
        if found is None:
            say("stays: nothing is faster by more than the noise")
            continue
        table.write(row, found.config, tools.note(found))
        output.write_text(table.text)
        say(f"now {describe(found.config)}: {found}")


def search(
    present: KernelConfig,
    candidates: Iterable[KernelConfig],
    call: Callable[[KernelConfig], Run],
    timer: Timer,
    deadline: float,
    report: Callable[[str], object],
) -> Found | None:
    """Time candidates against the best so far, until they or the time run out.

    Return the best candidate if a second timing shows a gain beyond both spreads; else None. `call`
    raises if a configuration's results are wrong or it cannot run. No candidate is begun after
    `deadline`, of `time.monotonic`.
    """
    first = call(present)
    best, run = present, first
    for config in candidates:
        if time.monotonic() > deadline:
            report("out of time")
            break
        try:
            new = call(config)
            timed = timer({best: run, config: new})
        except Exception as error:
            report(f"{describe(config)}: {type(error).__name__}: {error}".splitlines()[0])
            continue
        times, bar = timed[config].busy, timed[best].busy
        report(f"{describe(config)}: {times.median:.4f} ms, the best so far {bar.median:.4f} ms")
        if faster(times, bar):
            best, run = config, new
    if best == present:
        return None
    timed = timer({present: first, best: run})
    found = Found(best, timed[best].busy, timed[present].busy)
    return found if faster(found.times, found.before) else None


def show(
    table: ConfigTable, target: str, rows: Sequence[Row], survey: Surveyor, console: Console
) -> None:
    for row in rows:
        case, configs = _space(table, target, row)
        grid = [["tile, warps, stages", "registers", "spilled", "shared", "blocks", "verdict"]]
        styles, fit = [], 0
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


def case_of(table: ConfigTable, row: Row) -> TimedCase:
    for case in cases(row.kernel):
        if table.index_of(row.kernel, reader(row.kernel, case.spec)) == row.index:
            return case
    raise LookupError(f"{row}: expected a case in tuning/search/cases.py that reads it, got none")


def distinct(surveys: Iterable[Survey], present: KernelConfig) -> Iterator[KernelConfig]:
    """Return the configurations worth a launch, one for each distinct code."""
    seen = set()
    for entry in surveys:
        if entry.reason is None and entry.config != present and entry.code not in seen:
            yield entry.config
        seen.add(entry.code)


def faster(a: Times, b: Times) -> bool:
    return b.median - a.median > (a.slowest - a.fastest) + (b.slowest - b.fastest)


def describe(config: KernelConfig) -> str:
    """Return a configuration in few characters, such as "128×64, 8 warps, 3 stages"."""
    return f"{config.tile}, {config.num_warps} warps, {config.num_stages} stages"


def _space(table: ConfigTable, target: str, row: Row) -> tuple[TimedCase, list[KernelConfig]]:
    case = case_of(table, row)
    return case, [row.config, *candidates(row.kernel, case.spec, row.config, target)]
