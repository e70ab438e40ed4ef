"""``python -m bench SUITE`` times a suite on a GPU, ``python -m bench all`` all suites."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.measure import measure, prepare
from bench.records import append, drop_unfinished_line
from bench.records import load as read
from bench.registry import ON_CPU, SUITES, load
from bench.report import command as report
from bench.runner import INTERRUPTED, AnyJob
from twin_attention.interop.parity.arguments import make_folder
from twin_attention.targets.target import TARGETS


def add_parsers(commands: argparse._SubParsersAction) -> None:
    for name, (about, *_) in SUITES.items():
        parser = commands.add_parser(name, help=f"measure {about}", description=f"Measure {about}.")
        parser.add_argument("--json", type=Path, metavar="FILE", help="append records")
        if name in ON_CPU:
            parser.add_argument(
                "--device",
                choices=("cuda", "cpu"),
                help="cpu is a tiny case, to see that all of it runs (default: %(default)s)",
            )
        _add_arguments(parser, partial(_run, [name]))
    text = f"the suites {', '.join(SUITES)}, then their report"
    parser = commands.add_parser("all", help=text, description=f"Run {text}.")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        default=Path("reports/bench.jsonl"),
        help="append records; the report goes beside it (default: %(default)s)",
    )
    _add_arguments(parser, _run_all)


def _add_arguments(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]
) -> None:
    parser.add_argument(
        "--filter",
        default="",
        metavar="TEXT",
        help="part of a case's name and pass, such as 'd128 forward'",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="TEXT",
        default=[""],
        help="parts of implementations' names; those with none of them are left out",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="measure only what FILE lacks for this device, these versions and this commit",
    )
    parser.add_argument(
        "--memory-cap",
        type=float,
        metavar="GIB",
        help="memory of the GPU that an implementation may take; what needs more is out of memory",
    )
    parser.set_defaults(run=run, refuse=parser.error, device="cuda")


def _run_all(arguments: argparse.Namespace) -> int:
    code = _run(list(SUITES), arguments)
    parser = argparse.ArgumentParser()
    report.add_parser(parser.add_subparsers())
    path: Path = arguments.json
    reporting = parser.parse_args(["report", str(path), "--output", str(path.parent)])
    return reporting.run(reporting) or code


def _run(names: Sequence[str], arguments: argparse.Namespace) -> int:
    chosen = _choose(names, arguments)
    setting = prepare(arguments.refuse, arguments.device, arguments.memory_cap)
    setting = setting._replace(path=arguments.json, resume=arguments.resume)
    from twin_attention.interop.parity.environment import choose_targets

    targets = choose_targets(arguments.device, None)
    code = 0
    if path := arguments.json:
        append(path, setting.journal.crashed)
    for name in chosen:
        jobs = _only(_jobs(name, targets, arguments.filter), arguments.only)
        code = measure(name, jobs, setting)
        if code == INTERRUPTED:
            break
    return code


def _choose(names: Sequence[str], arguments: argparse.Namespace) -> list[str]:
    if arguments.resume and arguments.json is None:
        arguments.refuse("--resume: expected --json FILE beside it, got none")
    if arguments.memory_cap is not None and not arguments.memory_cap > 0:
        arguments.refuse(f"--memory-cap: expected more than 0 GiB, got {arguments.memory_cap:g}")
    targets = TARGETS if arguments.device == "cuda" else (None,)
    found = {name: _jobs(name, targets, arguments.filter) for name in names}
    if not any(found.values()):
        arguments.refuse(f"--filter: expected part of a case's name, got {arguments.filter!r}")
    chosen = [name for name, jobs in found.items() if _only(jobs, arguments.only)]
    if not chosen:
        got = ", ".join(map(repr, arguments.only))
        arguments.refuse(f"--only: expected part of an implementation's name, got {got}")
    if arguments.json is not None:
        _prepare_file(arguments.json, arguments)
    return chosen


def _jobs(name: str, targets: Sequence[Any], pattern: str) -> list[AnyJob]:
    return [job for job in load(name).jobs(targets) if pattern in job.title]


def _only(jobs: Sequence[AnyJob], texts: Sequence[str]) -> list[AnyJob]:
    return [left for job in jobs if (left := job.only(texts)) is not None]


def _prepare_file(path: Path, arguments: argparse.Namespace) -> None:
    if path.suffix == ".gz" or path.is_dir():
        arguments.refuse(f"--json: expected a plain file to append to, got {str(path)!r}")
    make_folder(arguments.refuse, "--json", path.parent)
    if not path.exists():
        return
    if drop_unfinished_line(path):
        print(f"{path}: its last line was cut short and is dropped", file=sys.stderr)
    if arguments.resume:
        try:
            read(path)
        except ValueError as error:
            arguments.refuse(f"--resume: {error}")
