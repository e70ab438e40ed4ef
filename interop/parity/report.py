"""The files that a run leaves: ``parity.json``, and ``parity.html``, which needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from interop.parity.plot import ratio_plot
from interop.parity.records import (
    CaseResult,
    Comparison,
    Report,
    problem_text,
    worst,
    worst_of_all,
)
from interop.parity.table import failures, ratio_text


def write(report: Report, folder: Path) -> list[Path]:
    """Write ``parity.json`` and ``parity.html`` into `folder`, and say where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    json_path, html_path = folder / "parity.json", folder / "parity.html"
    json_path.write_text(report.to_json(), encoding="utf-8")
    html_path.write_text(to_html(report), encoding="utf-8")
    return [json_path, html_path]


def to_html(report: Report) -> str:
    """One page with the facts, the failures, a picture of errors against budgets, every number."""
    page = files("interop.parity")
    return Template(page.joinpath("report.html").read_text(encoding="utf-8")).substitute(
        style=page.joinpath("page.css").read_text(encoding="utf-8"),
        script=page.joinpath("page.js").read_text(encoding="utf-8"),
        summary=escape(report.summary),
        status=report.status,
        facts="\n".join(
            f"<dt>{escape(name)}<dd>{escape(value)}" for name, value in report.facts.items()
        ),
        failures=_failures(report.failed),
        worst="\n".join(_worst_row(report, title) for title in report.titles),
        plot=ratio_plot(report),
        cases=_case_table(report),
        comparisons="\n".join(_comparison_rows(report.cases)),
    )


def _failures(failed: list[CaseResult]) -> str:
    if not failed:
        return ""
    items = [
        f'<div class="failure"><b>{escape(case.name)}</b> '
        f"{escape(problem_text(case.problem))}<pre>{escape(chr(10).join(failures(case)))}</pre></div>"
        for case in failed
    ]
    return "\n".join([f"<h2>Failures ({len(failed)})</h2>", *items])


def _worst_row(report: Report, title: str) -> str:
    found = worst_of_all(report.cases, title)
    assert found is not None, "a title comes from a comparison"
    case, comparison = found
    count = sum(worst(case, title) is not None for case in report.cases)
    return _row(
        comparison.status,
        _text(title),
        _ratio(comparison),
        _text(comparison.output),
        _text(case.name),
        _number(str(count)),
    )


def _case_table(report: Report) -> str:
    lanes = "".join(f'<th class="number">{escape(title)}' for title in report.titles)
    ends = '<th class="number">seconds<th>problem'
    head = f"<thead><tr><th>case<th>status{lanes}{ends}</tr></thead>"
    rows = [
        _row(
            case.status,
            _text(case.name),
            _text(case.status, f"{case.status}-text"),
            *(_ratio(worst(case, title)) for title in report.titles),
            _number(f"{case.seconds:.1f}"),
            _text(problem_text(case.problem), "problem"),
        )
        for case in sorted(report.cases, key=lambda case: case.ok)
    ]
    return "\n".join([head, "<tbody>", *rows, "</tbody>"])


def _comparison_rows(cases: Iterable[CaseResult]) -> Iterable[str]:
    """Failures first, then the others, each by falling ratio."""
    pairs = [(case, c) for case in cases for c in case.comparisons]
    for case, c in sorted(pairs, key=lambda pair: -pair[1].agreement.ratio):
        seconds = {run.subject: f"{run.seconds:.2f}" for run in case.runs if not run.error}
        numbers = (c.agreement.max_error, c.agreement.max_budget, c.agreement.rmse,
                   c.agreement.rmse_budget)  # fmt: skip
        yield _row(
            c.status,
            *map(_text, (case.name, c.output, c.subject, c.against)),
            *(_number(f"{number:.3g}") for number in numbers),
            _ratio(c),
            _text(c.status, f"{c.status}-text"),
            _number(seconds.get(c.title, "")),
        )


def _row(status: str, *cells: str) -> str:
    return f'<tr class="{status}">' + "".join(cells) + "</tr>"


def _text(text: str, style: str = "") -> str:
    return f'<td class="{style}">{escape(text)}' if style else f"<td>{escape(text)}"


def _number(text: str) -> str:
    return _text(text, "number")


def _ratio(comparison: Comparison | None) -> str:
    if comparison is None:
        return _number("")
    return _text(ratio_text(comparison.agreement.ratio), f"number {comparison.status}-text")
