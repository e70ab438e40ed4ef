"""Run random problems (``--fuzz``) or one problem (``--problem``)."""

from __future__ import annotations

import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from itertools import chain, takewhile
from threading import Event
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from twin_attention.interop.parity.cases import Case
from twin_attention.interop.parity.environment import choose_jobs, facts
from twin_attention.interop.parity.fuzz.problems import Problem, draw_claimed
from twin_attention.interop.parity.fuzz.shrink import shrink
from twin_attention.interop.parity.fuzz.trial import run_problem
from twin_attention.interop.parity.records import (
    CaseResult,
    Failure,
    Report,
    RunRecord,
    failures,
    failures_of,
    without_rounds,
)
from twin_attention.interop.parity.subjects.subject import Subject
from twin_attention.interop.parity.table import print_header
from twin_attention.interop.parity.workers import run_cases

# Tokens of a long sequence; an interpreter takes about a second for one.
LONGEST = {"cpu": 40, "cuda": 700}
# Seconds after which a step hangs; compilation alone may take most of a minute.
LIMIT = {"cpu": 300.0, "cuda": 180.0}
# How many similar failures to shrink, and the seconds for each.
SHRUNK, SHRINK_SECONDS = 2, 60.0
MINUTE = 60.0  # between two lines

Run = Callable[[Problem], CaseResult]


class Tried(NamedTuple):
    problem: Problem
    result: CaseResult
    run: Run
    libraries: Sequence[str]


def fuzz(
    groups: list[list[Subject]],
    device: str,
    seconds: float | None,
    seed: int,
    jobs: int | None,
    named: list[Case] | None = None,
    write: Callable[[Report], object] = lambda report: None,
) -> bool:
    """Run random problems for some time; return True if none failed.

    seconds: for drawing problems; shrinking takes more. None for named ones only.
    named: cases that come first; each group then runs in processes of its own.
    """
    console = Console()
    jobs = jobs or choose_jobs(device, "quick", 1000)
    subjects = [x for group in groups for x in group]
    header = {
        "fuzz": f"seed {seed}, {seconds} seconds in {jobs} processes",
        **{x.label: f"{x.package} {x.version}" for x in subjects},
        **facts(device),
    }
    print_header(console, header)
    apart = [groups] if named is None else [[group] for group in groups]
    tried: list[Tried] = []
    stop = Event()

    def search(own: list[list[Subject]]) -> None:
        run = partial(run_problem, groups=own, device=device)
        members = [x for group in own for x in group]
        libraries = [x.label for x in members if not x.is_guarded]  # none of ours
        cases = [x for x in named or () if any(y.supports(x) is None for y in members)]
        random = draw_claimed(members, seed, LONGEST[device]) if seconds else ()
        problems = takewhile(lambda _: not stop.is_set(), chain(map(Problem, cases), random))
        workers = max(1 if len(apart) > 1 else 2, jobs // len(apart))
        for problem, result in _run_all(run, problems, device, seconds, workers, console):
            if "case" in result.problem:  # its process died or hung
                runs = [RunRecord(x, error=result.error) for x in libraries[:1]]
                error = None if runs else result.error
                result = replace(result, problem=asdict(problem.case), runs=runs, error=error)
            line = "" if result.ok else reproduce(problem, libraries)
            tried.append(Tried(problem, replace(result, line=line), run, libraries))
            if line:
                lines = [f"    {x}" for x in (*failures(result), line)]
                _print(console, "\n".join([f"{problem.name} failed", *lines]), "red")

    with ThreadPoolExecutor(min(jobs, len(apart))) as pool:
        try:
            list(pool.map(search, apart))
        except KeyboardInterrupt:  # report what is done
            stop.set()
    write(Report(header, len(tried), [without_rounds(x.result) for x in tried]))
    found = [x for x in tried if not x.result.ok]
    _shrink_all(found, LIMIT[device], jobs, console)
    _print_tally(console, tried)
    return not found


def run_one(groups: list[list[Subject]], device: str, line: str) -> int:
    """Run the problem in a failure's printed line; return the exit code, or raise ValueError."""
    console, problem = Console(), Problem.of_line(line)
    run = partial(run_problem, groups=groups, device=device)
    (result,) = run_cases([problem], run, 1, lambda name: None, LIMIT[device])
    for text in failures(result):
        _print(console, text, "red")
    _print_tally(console, [Tried(problem, result, run, ())])
    return int(not result.ok)


def _run_all(
    run: Callable[[Problem], CaseResult],
    problems: Iterator[Problem],
    device: str,
    seconds: float | None,
    jobs: int,
    console: Console,
) -> Iterator[tuple[Problem, CaseResult]]:
    begin, minutes = time.monotonic(), 1.0
    drawn: dict[str, Problem] = {}

    def in_time() -> Iterator[Problem]:
        for problem in problems:
            if seconds is not None and time.monotonic() > begin + seconds:
                return
            drawn[problem.name] = problem
            yield problem

    with closing(run_cases(in_time(), run, jobs, lambda name: None, LIMIT[device])) as results:
        for done, result in enumerate(results, 1):
            spent = time.monotonic() - begin
            if spent > minutes * MINUTE:
                minutes = spent // MINUTE + 1
                _print(console, f"{spent:.0f} of {seconds} seconds: {done} problems")
            yield drawn.pop(result.name), result


def reproduce(problem: Problem, libraries: Sequence[str] = ()) -> str:
    chosen = " --subject " + shlex.join(libraries) if libraries else ""
    line = shlex.quote(problem.to_line())
    return f"python -m twin_attention.interop.parity{chosen} --problem {line}"


def _shrink_all(found: list[Tried], limit: float, jobs: int, console: Console) -> None:
    chosen, alike = [], Counter()
    for x in found:
        kinds = frozenset(failures_of(x.result))
        alike[kinds] += 1
        if alike[kinds] <= SHRUNK:
            chosen.append((x, kinds))

    def search(item: tuple[Tried, frozenset[Failure]]) -> None:
        x, kinds = item
        smallest = shrink(x.problem, set(kinds), x.run, limit, SHRINK_SECONDS)
        subjects = ", ".join(f"{subject}: {kind}" for subject, kind in sorted(kinds))
        _print(console, f"\nsmallest with {subjects}\n    {reproduce(smallest, x.libraries)}")

    with ThreadPoolExecutor(max(1, jobs // 2)) as pool:
        list(pool.map(search, chosen))


def _print_tally(console: Console, tried: Sequence[Tried]) -> None:
    runs, failed, worst = Counter(), Counter(), defaultdict[tuple[str, str], float](float)
    for x in tried:
        operation = type(x.problem.case).__name__.removesuffix("Case").lower()
        wrong = {subject for subject, _ in failures_of(x.result)}
        for subject in {run.subject for run in x.result.runs if not run.refused} | wrong:
            runs[operation, subject] += 1
            failed[operation, subject] += subject in wrong
        for c in x.result.comparisons:
            key = operation, c.subject.partition(",")[0]
            worst[key] = max(worst[key], c.agreement.ratio)
    titles = f"\n{'operation':13}{'implementation':26}{'problems':>9}{'failed':>8}{'worst':>8}"
    _print(console, titles, "bold")
    for key in sorted(runs):
        row = f"{key[0]:13}{key[1]:26}{runs[key]:9}{failed[key]:8}{worst[key]:8.2f}"
        _print(console, row, "red" if failed[key] else "")
    count = sum(not x.result.ok for x in tried)
    text = f"\n{len(tried)} problems, {count} failed"
    _print(console, text, "bold red" if count else "green")


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
