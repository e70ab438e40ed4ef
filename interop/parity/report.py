"""Write the files of a run: ``parity.json``, and ``parity.html``, which needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from interop.parity.plot import ratio_plot
from interop.parity.records import Comparison, Report, problem_text, worst, worst_of_all
from interop.parity.table import failures, ratio_text
from interop.rendering.page import facts, figure, page
from interop.rendering.tables import Cell, to_html

_INTRODUCTION = (
    "Both implementations ran on the same tensors. Each result is compared with a float64 oracle; "
    "its budget is a small multiple of what the plain formula loses in the inputs' dtype. Twins "
    "are compared with each other, and may differ by the sum of their budgets. A ratio above 1 "
    "fails."
)
_CAPTION = (
    "A dot is a case; within a lane the cases stand from top to bottom in the order they ran. The "
    "worst one is named. A cross is a NaN or an unexpected infinity."
)


def write(report: Report, folder: Path) -> list[Path]:
    """Write ``parity.json`` and ``parity.html`` into `folder` and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    json_path, html_path = folder / "parity.json", folder / "parity.html"
    json_path.write_text(report.to_json(), encoding="utf-8")
    html_path.write_text(to_page(report), encoding="utf-8")
    return [json_path, html_path]


def to_page(report: Report) -> str:
    """Return one page: facts, failures, a picture of errors against budgets, every number."""
    return page(f"Parity: {report.summary}", [(report.status, report.status)], _body(report))


def _body(report: Report) -> Iterator[str]:
    yield f"<p>{_INTRODUCTION}</p>"
    yield facts(report.facts)
    if report.failed:
        yield f"<h2>Failures ({len(report.failed)})</h2>"
    for case in report.failed:
        lines = escape("\n".join(failures(case)))
        problem = escape(problem_text(case.problem))
        yield f'<div class="failure"><b>{escape(case.name)}</b> {problem}<pre>{lines}</pre></div>'
    yield "<h2>Worst error / budget</h2>"
    yield _worst(report)
    yield "<h2>Error against budget</h2>"
    yield figure(ratio_plot(report), _CAPTION, "Every error over its budget, by output")
    yield "<h2>Cases</h2>"
    yield _cases(report)
    yield "<h2>Every comparison</h2>"
    yield _comparisons(report)


def _worst(report: Report) -> str:
    rows, looks = [], []
    for title in report.titles:
        found = worst_of_all(report.cases, title)
        assert found is not None, "a title comes from a comparison"
        case, c = found
        count = sum(worst(case, title) is not None for case in report.cases)
        rows.append([title, _ratio(c), c.output, case.name, str(count)])
        looks.append(c.status)
    return to_html(["comparison", "ratio", "output", "case", "cases"], rows, looks)


def _cases(report: Report) -> str:
    """Return a row for each case, failures first."""
    cases = sorted(report.cases, key=lambda case: case.ok)
    rows = [
        [
            case.name,
            Cell(case.status, case.status),
            *(_ratio(worst(case, title)) for title in report.titles),
            f"{case.seconds:.1f}",
            Cell(problem_text(case.problem), "muted"),
        ]
        for case in cases
    ]
    titles = ["case", "status", *report.titles, "seconds", "problem"]
    return to_html(titles, rows, [case.status for case in cases])


def _comparisons(report: Report) -> str:
    """Return a row for each comparison, by falling ratio."""
    pairs = [(case, c) for case in report.cases for c in case.comparisons]
    pairs.sort(key=lambda pair: -pair[1].agreement.ratio)
    rows = []
    for case, c in pairs:
        a = c.agreement
        seconds = {run.subject: f"{run.seconds:.2f}" for run in case.runs if not run.error}
        numbers = (f"{x:.3g}" for x in (a.max_error, a.max_budget, a.rmse, a.rmse_budget))
        rows.append([
            case.name, c.output, c.subject, c.against, *numbers, _ratio(c),
            Cell(c.status, c.status), seconds.get(c.title, ""),
        ])  # fmt: skip
    titles = ["case", "output", "result", "against", "max error", "budget", "rmse", "rmse budget",
              "ratio", "status", "seconds"]  # fmt: skip
    return to_html(titles, rows, [c.status for _, c in pairs], filtered=True)


def _ratio(comparison: Comparison | None) -> Cell:
    if comparison is None:
        return Cell("")
    return Cell(ratio_text(comparison.agreement.ratio), comparison.status)
