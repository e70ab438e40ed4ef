"""Write the files of a run: ``parity.json`` and a self-contained ``parity.html``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from html import escape
from importlib import import_module
from itertools import product
from pathlib import Path

from twin_attention.interop.parity.records import (
    CaseResult,
    Comparison,
    Failure,
    Report,
    failures,
    failures_of,
    features_of,
    problem_text,
    worst,
    worst_of_all,
)
from twin_attention.interop.parity.table import ratio_text
from twin_attention.interop.rendering.page import facts, page
from twin_attention.interop.rendering.tables import Cell, to_html, to_markdown
from twin_attention.targets.config import PACKAGES
from twin_attention.targets.family import families_of

_INTRODUCTION = (
    "Both implementations ran on the same tensors. Each result is compared with a float64 oracle; "
    "its budget is a small multiple of what the plain formula loses in the inputs' dtype. Twins "
    "are compared with each other, and may differ by the sum of their budgets. A ratio above 1 "
    "fails."
)
_MATRIX = (
    "How many cases of a function, and of each feature, passed and ran, and the largest error over"
    " its budget; 'not claimed' where a subject ran none, 'refuses' what a library says that it "
    "does not do. A family stands under its framework, and "
    "foreign ones have the other's kernels. Where two frameworks ran the same kernels, the number"
    " of results with the same bits follows."
)


def write(report: Report, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    json_path, html_path = folder / "parity.json", folder / "parity.html"
    json_path.write_text(report.to_json(), encoding="utf-8")
    html_path.write_text(to_page(report), encoding="utf-8")
    return [json_path, html_path]


def write_table(report: Report, folder: Path) -> None:
    """Write ``conformance.json`` and ``conformance.md``: subjects by features, and failures."""
    parts = ["# Libraries by properties", _MATRIX]
    parts += ["\n".join(f"- {name}: {value}" for name, value in report.facts.items())]
    for function, rows in _groups(report).items():
        cases = rows[function]
        subjects = _subjects(cases)
        outputs = dict.fromkeys(c.output for case in cases for c in case.comparisons)
        grid = [["", *subjects]]
        grid += [[f"*{x}*", *(_passed(cases, y, x).text for y in subjects)] for x in outputs]
        for name, some in rows.items():
            title = "all" if name == function else name.removeprefix(f"{function}, ")
            grid.append([title, *(_passed(some, subject).text for subject in subjects)])
        parts += [f"## {function}", to_markdown(grid)]
    parts += ["## Failures"] if report.failed else []
    alike = defaultdict[frozenset[Failure], list[CaseResult]](list)
    for case in report.failed:
        alike[frozenset(failures_of(case))].append(case)
    for kinds, cases in alike.items():
        number = f" ({len(cases)} problems)" * (len(cases) > 1)
        parts.append(", ".join(f"{x}: {kind}" for x, kind in sorted(kinds)) + number)
        lines = [*failures(cases[0]), *filter(None, [cases[0].line])]
        parts.append("\n".join(["```", *lines, "```"]))
    (folder / "conformance.json").write_text(report.to_json(), encoding="utf-8")
    (folder / "conformance.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"wrote {folder / 'conformance.md'}")


def to_page(report: Report) -> str:
    """Return one page: facts, failures, errors against budgets, every number."""
    return page(f"Parity: {report.summary}", [(report.status, report.status)], _body(report))


def _body(report: Report) -> Iterator[str]:
    yield f"<p>{_INTRODUCTION}</p>"
    yield facts(report.facts)
    if report.failed:
        yield f"<h2>Failures ({len(report.failed)})</h2>"
    for case in report.failed:
        lines = escape("\n".join([*failures(case), *filter(None, [case.line])]))
        problem = escape(problem_text(case.problem))
        yield f'<div class="failure"><b>{escape(case.name)}</b> {problem}<pre>{lines}</pre></div>'
    yield "<h2>Worst error / budget</h2>"
    yield _worst(report)
    yield "<h2>Every kernel in every framework</h2>"
    yield f"<p>{_MATRIX}</p>"
    yield _matrix(report)
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


def _matrix(report: Report) -> str:
    """Return a row per function and option, and a column per family."""
    subjects = _subjects(report.cases)
    pairs = [(a, b) for a, b in product(subjects, subjects) if a < b and _run_the_same(a, b)]
    rows = [
        [
            name,
            *(_passed(cases, subject) for subject in subjects),
            *(_equal_bits(cases, pair) for pair in pairs),
        ]
        for rows_of_function in _groups(report).values()
        for name, cases in rows_of_function.items()
    ]
    titles = [*map(_family_title, subjects), *(f"same bits: {a} and {b}" for a, b in pairs)]
    return to_html(["problem", *titles], rows)


def _subjects(cases: list[CaseResult]) -> list[str]:
    return list(dict.fromkeys(run.subject for case in cases for run in case.runs))


def _groups(report: Report) -> dict[str, dict[str, list[CaseResult]]]:
    groups: dict[str, dict[str, list[CaseResult]]] = {}
    for case in report.cases:
        function, *features = features_of(case.problem)
        for name in (function, *(f"{function}, {x}" for x in features)):
            groups.setdefault(function, {}).setdefault(name, []).append(case)
    return groups


def _passed(cases: list[CaseResult], subject: str, output: str = "") -> Cell:
    runs = [(case, run) for case in cases for run in case.runs if run.subject == subject]
    by_case = [
        (run, [c for c in case.comparisons if c.title == subject and output in ("", c.output)])
        for case, run in runs
        if run.refused is None
    ]
    ok = [
        (bool(output) or run.error is None) and all(c.ok for c in found)
        for run, found in by_case
        if found or not output
    ]
    if not runs or (output and by_case and not ok):
        return Cell("not claimed", "muted")
    if not ok:
        return Cell(f"refuses {len(runs)} of {len(runs)}", "muted")
    most = max((c.agreement.ratio for _, found in by_case for c in found), default=0.0)
    refused = len(runs) - len(by_case)
    text = f"{sum(ok)} of {len(ok)}, {ratio_text(most)}" + f", refuses {refused}" * bool(refused)
    return Cell(text, "passed" if all(ok) else "failed")


def _equal_bits(cases: list[CaseResult], pair: tuple[str, str]) -> Cell:
    both = [
        c.agreement.max_error == 0 and c.agreement.finite
        for case in cases
        for c in case.comparisons
        if {c.subject, c.against} == {*pair}
    ]
    return Cell(f"{sum(both)} of {len(both)}" if both else "")


def _run_the_same(a: str, b: str) -> bool:
    """Return True if both labels stand for the same kernels and target."""
    if not (_kernels(a) and _kernels(b)):
        return False
    (side, _, *target), (other_side, _, *other_target) = a.split(), b.split()
    is_across = (side != other_side) and target == other_target
    return is_across and bool(_kernels(a) & _kernels(b))


def _family_title(subject: str) -> str:
    """Return a subject's label, with the owner of a foreign family's kernels."""
    packages = {package for package, _ in _kernels(subject)} - {subject.split()[0]}
    return f"{subject} ({', '.join(sorted(packages))})" if packages else subject


def _kernels(subject: str) -> set[tuple[str, str]]:
    side, name, *_ = (*subject.split(), "")
    if side not in PACKAGES:  # another library
        return set()
    import_module(side)  # which then has its families
    return {(x.package, x.folder) for x in families_of(side) if x.name == name and x.folder}


def _cases(report: Report) -> str:
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
    pairs = [(case, c) for case in report.cases for c in case.comparisons]
    pairs.sort(key=lambda pair: -pair[1].agreement.ratio)
    rows = []
    for case, c in pairs:
        a = c.agreement
        seconds = {
            run.subject: f"{run.seconds:.2f}" for run in case.runs if run.seconds is not None
        }
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
