"""Run random problems (``--fuzz``) or one problem (``--problem``)."""

from __future__ import annotations

import json
import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, takewhile
from pathlib import Path
from threading import Event, Lock

from rich.console import Console
from rich.progress import track
from rich.text import Text

from twin_attention.interop.parity.cases import Case
from twin_attention.interop.parity.environment import choose_jobs, facts
from twin_attention.interop.parity.fuzz.problems import Problem, draw_claimed
from twin_attention.interop.parity.fuzz.shrink import Failure, failures_of, shrink
from twin_attention.interop.parity.fuzz.trial import run_problem
from twin_attention.interop.parity.records import CaseResult, Report, failures, without_rounds
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
Failed = tuple[Problem, CaseResult, Run]


@dataclass
class Tally:
    """Counts of what ran; `runs` is by (operation, subject), `worst` the largest error over its
    budget.
    """

    problems: int = 0
    runs: Counter[tuple[str, str]] = field(default_factory=Counter)
    failed: Counter[tuple[str, str]] = field(default_factory=Counter)
    worst: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))

    def add(self, problem: Problem, result: CaseResult) -> None:
        self.problems += 1
        operation = type(problem.case).__name__.removesuffix("Case").lower()
        subjects = {run.subject for run in result.runs if not run.refused} | {
            x for x, _ in failures_of(result)
        }
        for subject in subjects:
            self.runs[operation, subject] += 1
        for subject in {subject for subject, _ in failures_of(result)}:
            self.failed[operation, subject] += 1
        for c in result.comparisons:
            key = operation, c.subject.partition(",")[0]
            self.worst[key] = max(self.worst[key], c.agreement.ratio)

    def rows(self) -> list[tuple[str, str, int, int, float]]:
        return [
            (*key, self.runs[key], self.failed[key], self.worst[key]) for key in sorted(self.runs)
        ]


@dataclass(frozen=True)
class Found:
    """A failure, and the smallest problem found that fails alike."""

    failures: frozenset[Failure]
    result: CaseResult
    problem: Problem


def fuzz(
    groups: list[list[Subject]],
    device: str,
    seconds: float | None,
    seed: int,
    jobs: int | None,
    output: Path,
    named: list[Case] | None = None,
    write: Callable[[Report], object] = lambda report: None,
) -> bool:
    """Run random problems for some time; return True if none failed.

    Args:
        seconds: for drawing problems; shrinking takes more. None for named ones only.
        output: folder for ``fuzz.json``.
        named: cases that come first; each group then runs in processes of its own.
        write: takes the results before failures are shrunk.
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
    tally, results, lock, stop = Tally(), [], Lock(), Event()

    def search(own: list[list[Subject]]) -> None:
        run = partial(run_problem, groups=own, device=device)
        members = [x for group in own for x in group]
        cases = [x for x in named or () if any(y.supports(x) is None for y in members)]
        random = draw_claimed(members, seed, LONGEST[device]) if seconds else ()
        problems = chain(map(Problem, cases), random)
        workers = max(1 if len(apart) > 1 else 2, jobs // len(apart))
        problems = takewhile(lambda _: not stop.is_set(), problems)
        for problem, result in _run_all(run, problems, device, seconds, workers, console):
            with lock:
                tally.add(problem, result)
                line = "" if result.ok else reproduce(problem, result)
                results.append((problem, replace(result, line=line), run))

    with ThreadPoolExecutor(min(jobs, len(apart))) as pool:
        try:
            [*pool.map(search, apart)]
        except KeyboardInterrupt:  # report what is done
            stop.set()
    plain = [without_rounds(result) for _, result, _ in results]
    write(Report(header, len(results), plain))
    found = [x for x in results if not x[1].ok]
    shrunk = _shrink_all(found, LIMIT[device], jobs, console)
    _print_tally(console, tally, len(found))
    _write(output, header, tally, found, shrunk)
    return not found


def run_one(groups: list[list[Subject]], device: str, line: str) -> int:
    """Run the problem in a failure's printed line; return the exit code.

    Raises:
        ValueError: the line is no problem.
    """
    console, problem = Console(), Problem.of_line(line)
    run = partial(run_problem, groups=groups, device=device)
    (result,) = run_cases([problem], run, 1, lambda name: None, LIMIT[device])
    tally = Tally()
    tally.add(problem, result)
    for text in failures(result):
        _print(console, text, "red")
    _print_tally(console, tally, 0 if result.ok else 1)
    return 0 if result.ok else 1


def _run_all(
    run: Callable[[Problem], CaseResult],
    problems: Iterator[Problem],
    device: str,
    seconds: float | None,
    jobs: int,
    console: Console,
) -> Iterator[tuple[Problem, CaseResult]]:
    """Yield problems that begin in time, and their results; print failures."""
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
            problem = drawn.pop(result.name)
            if not result.ok:
                lines = [f"    {x}" for x in (*failures(result), reproduce(problem, result))]
                _print(console, "\n".join([f"{problem.name} failed", *lines]), "red")
            yield problem, result


def reproduce(problem: Problem, result: CaseResult | None = None) -> str:
    """Return the command that repeats a problem, on the subjects that fail it."""
    ran = {run.subject for run in result.runs} if result else set()
    names = sorted(ran & {subject for subject, _ in failures_of(result)}) if result else []
    own = any(name.startswith(("torch_attn ", "pallas_attn ")) for name in names)
    chosen = "" if own or not names else " --subject " + " ".join(map(shlex.quote, names))
    line = shlex.quote(problem.to_line())
    return f"python -m twin_attention.interop.parity{chosen} --problem {line}"


def _shrink_all(
    found: list[Failed],
    limit: float,
    jobs: int,
    console: Console,
) -> list[Found]:
    """Shrink and print a few failures of each kind."""
    chosen, alike = [], Counter()
    for problem, result, run in found:
        failures_found = frozenset(failures_of(result))
        alike[failures_found] += 1
        if alike[failures_found] <= SHRUNK:
            chosen.append((problem, result, run, failures_found))

    if not chosen:
        return []

    def search(item: tuple[Problem, CaseResult, Run, frozenset[Failure]]) -> Found:
        problem, result, run, failures_found = item
        smallest = shrink(problem, set(failures_found), run, limit, SHRINK_SECONDS)
        return Found(failures_found, result, smallest)

    with ThreadPoolExecutor(max(1, jobs // 2)) as pool:
        smaller = pool.map(search, chosen)
        shrunk = [*track(smaller, "shrinking", len(chosen), console=console, transient=True)]
    for one in shrunk:
        subjects = ", ".join(f"{subject}: {kind}" for subject, kind in sorted(one.failures))
        _print(console, f"\nsmallest with {subjects}", "bold")
        _print(console, f"    {reproduce(one.problem, one.result)}")
    return shrunk


def _print_tally(console: Console, tally: Tally, num_failed: int) -> None:
    _print(
        console,
        f"\n{'operation':13}{'implementation':26}{'problems':>9}{'failed':>8}{'worst':>8}",
        "bold",
    )
    for operation, subject, runs, failed, worst in tally.rows():
        style = "red" if failed else ""
        _print(console, f"{operation:13}{subject:26}{runs:9}{failed:8}{worst:8.2f}", style)
    style = "bold red" if num_failed else "green"
    _print(console, f"\n{tally.problems} problems, {num_failed} failed", style)


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)


def _write(
    folder: Path,
    header: dict[str, str],
    tally: Tally,
    found: list[Failed],
    shrunk: list[Found],
) -> None:
    names = ("operation", "implementation", "problems", "failed", "worst")
    document = {
        "facts": header,
        "problems": tally.problems,
        "runs": [dict(zip(names, row, strict=True)) for row in tally.rows()],
        "failed": [{"problem": x.to_line(), "lines": failures(result)} for x, result, _ in found],
        "smallest": [one.problem.to_line() for one in shrunk],
    }
    (folder / "fuzz.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
