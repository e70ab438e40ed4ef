"""Run both implementations on the same tensors and compare them with one error budget.

Exit codes: 0 every case passed, 1 a case failed, 2 bad arguments or a missing package, 130
interrupted with no failure so far.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from twin_attention.interop.parity.arguments import count, make_folder, require
from twin_attention.interop.parity.cases import Case
from twin_attention.interop.parity.records import ORACLE, CaseResult, Report, problem_text, title
from twin_attention.interop.parity.suites.choose import SUITES
from twin_attention.interop.parity.suites.kinds import KINDS
from twin_attention.interop.parity.workers import run_cases
from twin_attention.targets.target import TARGETS

if TYPE_CHECKING:
    from twin_attention.interop.parity.subjects.subject import Subject

IMPLEMENTATIONS = ("gluon", "mosaic", "triton", "torch_triton", "reference")
DEFAULT = IMPLEMENTATIONS[:-1]  # every family that has kernels, foreign ones among them
INTERRUPTED = 130  # the exit code
LOG_WIDTH = 240  # of the table where nothing says how wide the output is
NEEDED = ("jax", "rich", "torch", "triton")


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    names = ("full", "large") if options.suite == "all" else (options.suite,)
    suites = {name: cases for name in names if (cases := _choose(name, options.filter))}
    if not suites:
        parser.error(
            f"--filter: expected part of a case's name in suite {options.suite!r}, "
            f"got {' '.join(options.filter)!r}"
        )
    if options.list:
        _list(chain(*suites.values()))
        return 0
    require(parser.error, NEEDED)
    # JAX would otherwise reserve most of the card.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from twin_attention.interop.parity.environment import (
        choose_device,
        choose_targets,
        compile_quickly,
    )

    compile_quickly()
    device = choose_device()
    try:
        targets = choose_targets(device, options.target)
    except (ValueError, NotImplementedError) as error:
        parser.error(str(error))
    from twin_attention.interop.parity.sides import plan
    from twin_attention.interop.parity.subjects.choose import choose_subjects, list_subjects

    if options.subjects:
        list_subjects(device)
        return 0
    implementations = tuple(dict.fromkeys(options.implementations))
    groups: list[list[Subject]] = [[*group] for group in plan(implementations, targets)]
    if options.subject:
        try:
            groups = choose_subjects(options.subject, groups, device)
        except ValueError as error:
            parser.error(str(error))
    if not any(groups):
        got = " ".join(implementations)
        parser.error(f"--implementations: expected one with kernels for this device, got {got!r}")
    make_folder(parser.error, "--output", options.output)
    from twin_attention.interop.parity.fuzz.command import fuzz, run_one

    try:
        if options.problem is not None:
            return run_one(groups, device, options.problem)
    except ValueError as error:
        parser.error(f"--problem: {error}")
    if options.fuzz is None and not options.subject:
        return _run(suites, groups, device, options)
    asked = (options.fuzz, options.seed, options.jobs)
    if not options.subject:
        return int(not fuzz(groups, device, *asked))
    from twin_attention.interop.parity.report import write_table

    named, write = [*chain(*suites.values())], partial(write_table, folder=options.output)
    return int(not fuzz(groups, device, *asked, named, write))


def _list(cases: Iterable[Case]) -> None:
    try:
        for case in cases:
            print(f"{case.name:36} {problem_text(asdict(case))}")
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would fail again when it flushes the buffer at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(
    suites: dict[str, list[Case]],
    groups: list[list[Subject]],
    device: str,
    options: argparse.Namespace,
) -> int:
    from twin_attention.interop.parity.environment import choose_jobs, facts
    from twin_attention.interop.parity.harness import run_case, what_runs
    from twin_attention.interop.parity.report import write
    from twin_attention.interop.parity.subjects.subject import twins
    from twin_attention.interop.parity.table import CaseTable, print_header, print_summary
    from twin_attention.interop.rendering.tables import console_of

    console = console_of(LOG_WIDTH)
    cases = list(chain(*suites.values()))
    subjects = [subject for group in groups for subject in group]
    texts = " or ".join(repr(text) for text in options.filter)
    chosen = f"{options.suite}, {len(cases)} cases" + (
        f" with {texts} in the name" if any(options.filter) else ""
    )
    jobs = {
        suite: options.jobs or choose_jobs(device, suite, len(members))
        for suite, members in suites.items()
    }
    header = {
        "suite": chosen,
        **what_runs(_first_that_launches(cases), subjects, device),
        **facts(device),
        "processes": ", ".join(f"{number} ({suite})" for suite, number in jobs.items()),
    }
    print_header(console, header)
    titles = [title(subject.label, ORACLE) for subject in subjects]
    titles += [title(a.label, b.label) for group in groups for a, b in twins(group)]
    names = [case.name for case in cases]
    results: list[CaseResult] = []
    table = CaseTable(console, titles, names)
    table.print_titles()
    run = partial(run_case, groups=groups, device=device)
    interrupted = False
    with table:
        try:
            for suite, members in suites.items():
                with closing(run_cases(members, run, jobs[suite], table.begin)) as finished:
                    for result in finished:
                        results.append(result)
                        table.finish(result)
        except KeyboardInterrupt:
            interrupted = True
    results.sort(key=lambda result: names.index(result.name))
    report = Report(header, len(cases), results)
    print_summary(console, report, write(report, options.output))
    return 1 if not report.ok else INTERRUPTED if interrupted else 0


def _choose(suite: str, texts: Sequence[str]) -> list[Case]:
    found = [case for cases in KINDS for case in cases(suite)]
    return [case for case in found if any(text in case.name for text in texts)]


def _first_that_launches(cases: list[Case]) -> Case:
    """Return the first case that is not empty; the header shows its choices."""
    return next((case for case in cases if not case.spec.is_empty), cases[0])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage="python -m twin_attention.interop.parity [options]",
        description="Run both implementations on the same tensors, against one error budget.",
        epilog="exit codes: 0 passed, 1 a case failed, 2 bad arguments, 130 interrupted",
    )
    parser.add_argument(
        "--suite", choices=(*SUITES, "all"), default="quick", help="which cases (default: quick)"
    )
    parser.add_argument(
        "--filter",
        metavar="TEXT",
        nargs="+",
        default=[""],
        help="only cases with one of these texts in their name",
    )
    parser.add_argument("--list", action="store_true", help="list the chosen cases and stop")
    parser.add_argument(
        "--implementations",
        nargs="+",
        choices=IMPLEMENTATIONS,
        default=DEFAULT,
        metavar="NAME",
        help=f"what runs, where a package and the target have it, of {', '.join(IMPLEMENTATIONS)} "
        f"(default: {' '.join(DEFAULT)})",
    )
    parser.add_argument(
        "--subject",
        nargs="+",
        metavar="NAME",
        help="run these in place of --implementations, on the cases that they claim: libraries, "
        'ours by label such as "torch_attn triton", or all libraries',
    )
    parser.add_argument(
        "--subjects", action="store_true", help="list the libraries, or why they do not run"
    )
    parser.add_argument(
        "--target",
        choices=TARGETS,
        help="compile for this target only (default: all that the GPU runs)",
    )
    parser.add_argument(
        "--jobs",
        type=count,
        metavar="N",
        help="processes that the cases are spread over, each with its own frameworks (default: "
        "on a GPU as many as cores, at most 14; on a CPU half as many, at most 2; no more than "
        "half the cases; 1 for suite large, a case of which may take most of a card's memory)",
    )
    parser.add_argument(
        "--fuzz",
        type=count,
        metavar="SECONDS",
        help="run random problems for SECONDS, each with a time limit, instead of a suite; with "
        "--subject the suite comes first, within the same time",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the random problems (default: 0)"
    )
    parser.add_argument(
        "--problem", metavar="JSON", help="run one random problem again, as its failure printed it"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("reports"),
        metavar="FOLDER",
        help="where parity.json and parity.html go (default: reports)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
