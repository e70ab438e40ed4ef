"""Run both implementations on the same tensors and hold them to one error budget.

Exit codes: 0 every case passed, 1 a case failed, 2 bad arguments or a missing package,
130 interrupted with no failure so far.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from interop.contract.cases import SUITES, FlashCase, flash_cases
from interop.contract.target import TARGETS
from interop.parity.records import ORACLE, Report, problem_text, title

IMPLEMENTATIONS = ("triton", "reference")
NEEDED = ("jax", "matplotlib", "rich", "torch", "triton")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    suites = ("full", "large") if options.suite == "all" else (options.suite,)
    cases = [case for suite in suites for case in flash_cases(suite, options.filter)]
    if not cases:
        parser.error(
            f"--filter: expected part of a case's name in suite {options.suite!r}, "
            f"got {options.filter!r}"
        )
    if options.list:
        for case in cases:
            print(f"{case.name:36} {problem_text(asdict(case))}")
        return 0
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        parser.error(f"{', '.join(missing)} missing: pip install 'twin-attention[parity]'")
    # torch and JAX share the card: JAX must not reserve most of it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from interop.parity.environment import choose_device, choose_targets

    device = choose_device()
    try:
        targets = choose_targets(device, options.target)
    except (ValueError, NotImplementedError) as error:
        parser.error(str(error))
    return _run(cases, tuple(dict.fromkeys(options.implementations)), targets, device, options)


def _run(
    cases: list[FlashCase],
    implementations: tuple[str, ...],
    targets: tuple[str | None, ...],
    device: str,
    options: argparse.Namespace,
) -> int:
    from rich.console import Console

    from interop.parity.environment import facts
    from interop.parity.harness import run_case, what_runs
    from interop.parity.report import write
    from interop.parity.run import plan, twins
    from interop.parity.table import CaseTable, print_header, print_summary

    console = Console()
    groups = plan(implementations, targets)
    runners = [runner for group in groups for runner in group]
    chosen = f"{options.suite}, {len(cases)} cases" + (
        f" with {options.filter!r} in the name" if options.filter else ""
    )
    header = {"suite": chosen, **what_runs(cases[0], runners, device), **facts(device)}
    print_header(console, header)
    titles = [title(runner.label, ORACLE) for runner in runners]
    titles += [title(a.label, b.label) for group in groups for a, b in twins(group)]
    results = []
    table = CaseTable(console, titles, [case.name for case in cases])
    table.print_titles()
    interrupted = False
    with table:
        try:
            for case in cases:
                table.begin(case.name)
                result = run_case(case, groups, device)
                results.append(result)
                table.finish(result)
        except KeyboardInterrupt:
            interrupted = True
    report = Report(header, len(cases), results)
    print_summary(console, report, write(report, options.output))
    if not report.ok:
        return 1
    return 130 if interrupted else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m interop.parity",
        description="Run both implementations on the same tensors, against one error budget.",
        epilog="exit codes: 0 passed, 1 a case failed, 2 bad arguments, 130 interrupted",
    )
    parser.add_argument(
        "--suite", choices=(*SUITES, "all"), default="quick", help="which cases (default: quick)"
    )
    parser.add_argument(
        "--filter", metavar="TEXT", default="", help="only cases with TEXT in their name"
    )
    parser.add_argument("--list", action="store_true", help="list the chosen cases and stop")
    parser.add_argument(
        "--implementations",
        nargs="+",
        choices=IMPLEMENTATIONS,
        default=["triton"],
        help="what runs, in both packages (default: triton)",
    )
    parser.add_argument(
        "--target",
        choices=TARGETS,
        help="compile for this target only (default: all that the GPU runs)",
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
