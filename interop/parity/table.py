"""Print a run: header, a row per case, summary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from twin_attention.interop.parity.records import (
    CaseResult,
    Comparison,
    Report,
    failures,
    worst,
    worst_of_all,
)
from twin_attention.interop.rendering.tables import PROGRESS, progress_columns

# The widest cells, and a space.
COLUMN = 13
SECONDS = 8
STYLES = {"passed": "green", "failed": "bold red"}


class CaseTable(Progress):
    """Print a row per case as it ends, above a progress bar on a terminal.

    On a narrow console one column has the worst of all.
    """

    def __init__(self, console: Console, titles: Sequence[str], names: Sequence[str]):
        super().__init__(*progress_columns(), console=console, **PROGRESS)
        self._width = max(map(len, ["case", *names]))
        needed = self._width + COLUMN * len(titles) + SECONDS + max(map(len, STYLES)) + 2
        self._titles = list(titles)
        self._has_room = needed <= console.width
        self._task = self.add_task("", total=len(names))

    def print_titles(self) -> None:
        words = [title.split() for title in self._titles]
        if not self._has_room:
            words = [["worst"]]
        height = max(map(len, words))
        self._print(Text("error / budget, worst output", style="dim"))
        for line in range(height):
            last = line == height - 1
            cells = [dict(enumerate(column)).get(line, "") for column in words]
            cells = [f"{cell:>{COLUMN}}" for cell in cells] + [f"{'seconds' * last:>{SECONDS}}"]
            name = "case" if last else ""
            self._print(Text(f"{name:{self._width}}" + "".join(cells), style="bold"))

    def begin(self, name: str) -> None:
        self.update(self._task, description=name)

    def finish(self, result: CaseResult) -> None:
        row = Text(f"{result.name:{self._width}}")
        found = {title: worst(result, title) for title in self._titles}
        if not self._has_room:
            known = (each for each in found.values() if each is not None)
            found = {"worst": max(known, key=lambda c: c.agreement.ratio, default=None)}
        for comparison in found.values():
            row.append(_cell(comparison))
        row.append(f"{result.seconds:{SECONDS}.1f}  ")
        row.append(result.status, STYLES[result.status])
        self._print(row)
        for line in failures(result):
            self._print(Text(f"    {line}", style="red"))
        self.advance(self._task)

    def _print(self, line: Text) -> None:
        self.console.print(line, soft_wrap=True)


def print_header(console: Console, facts: dict[str, str]) -> None:
    width = max(map(len, facts))
    for name, value in facts.items():
        line = Text(f"{name:{width}}  ", style="bold")
        console.print(line + Text(value, style="not bold"), soft_wrap=True)
    console.print()


def print_summary(console: Console, report: Report, written: Sequence[Path]) -> None:
    console.print()
    console.print(Text("Worst error / budget", style="bold"))
    width = max(map(len, ["", *report.titles]))
    for title in report.titles:
        if (found := worst_of_all(report.cases, title)) is not None:
            case, comparison = found
            line = Text(f"{title:{width}}") + _cell(comparison) + f" of {case.name}"
            console.print(line, soft_wrap=True)
    console.print()
    for path in written:
        console.print(Text(f"wrote {path}"), soft_wrap=True)
    console.print(Text(report.summary, style=STYLES[report.status]))


def ratio_text(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 100 or ratio == float("inf") else f"{ratio:.1e}"


def _cell(comparison: Comparison | None) -> Text:
    if comparison is None:
        return Text(f"{'-':>{COLUMN}}", style="dim")
    ratio = comparison.agreement.ratio
    style = "red" if ratio > 1 else "yellow" if ratio > 0.8 else "green"
    return Text(f"{ratio_text(ratio) + ' ' + comparison.output:>{COLUMN}}", style=style)
