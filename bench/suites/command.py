"""``python -m bench SUITE``: time a suite on a GPU; ``python -m bench all``: time all of them."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.job import Job
from bench.journal import VARIABLE, Journal
from bench.records import append, drop_unfinished_line, origin
from bench.records import load as read
from bench.registry import ON_CPU, SUITES, load
from bench.report import command as report
from bench.runner import INTERRUPTED, NO_JOURNAL, Instruments, run_suite
from bench.sampling import Sampler, log_path, nvml_reader
from bench.training.job import TrainingJob
from interop.parity.arguments import make_folder
from twin_attention.targets.target import TARGETS

GIB = 2**30
PEER_PACKAGES = ("fa3-fwd", "flash-attn-4", "flashinfer-python", "tokamax", "transformers")


def add_parsers(commands: argparse._SubParsersAction) -> None:
    """Add a command for each suite, and "all", to ``python -m bench``."""
    for name, text in SUITES.items():
        parser = commands.add_parser(name, help=f"measure {text}", description=f"Measure {text}.")
        parser.add_argument("--json", type=Path, metavar="FILE", help="append records")
        parser.add_argument(
            "--gpu-log", type=Path, metavar="FILE", help="append clocks and power, as CSV"
        )
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
        help="append records; the report and the clocks and power during fa2 go beside it "
        "(default: %(default)s)",
    )
    _add_arguments(parser, _run_all)


def _add_arguments(
    parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]
) -> None:
    parser.add_argument("--filter", default="", help="part of a case's name")
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
    """Run all suites and report what there is; return 130 if interrupted."""
    code = _run(list(SUITES), arguments)
    parser = argparse.ArgumentParser()
    report.add_parser(parser.add_subparsers())
    path: Path = arguments.json
    reporting = parser.parse_args(["report", str(path), "--output", str(path.parent)])
    return reporting.run(reporting) or code


def _run(names: Sequence[str], arguments: argparse.Namespace) -> int:
    """Run suites, as far as the filter leaves jobs of them; return the exit code."""
    chosen = _choose(names, arguments)
    _prepare(arguments)
    # Once: a file of records under version control changes while it is written.
    facts = _facts(arguments.device)
    code = 0
    journal = Journal(Path(os.environ[VARIABLE])) if VARIABLE in os.environ else NO_JOURNAL
    if path := arguments.json:
        append(path, journal.crashed)
    for name in chosen:
        if len(names) == 1:
            log = arguments.gpu_log
        else:
            log = log_path(arguments.json, name) if name == "fa2" else None
        code = _measure(name, arguments, facts, log, journal)
        if code == INTERRUPTED:
            break
    return code


def _choose(names: Sequence[str], arguments: argparse.Namespace) -> list[str]:
    """Return the suites that the filter leaves; exit with code 2 where an argument is wrong."""
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


def _jobs(name: str, targets: Sequence[Any], pattern: str) -> list[Job | TrainingJob]:
    """Return a suite's jobs of the cases whose names contain a pattern."""
    return [job for job in load(name).jobs(targets) if pattern in job.case["name"]]


def _only(jobs: Sequence[Job | TrainingJob], texts: Sequence[str]) -> list[Job | TrainingJob]:
    """Return the jobs of the implementations whose names contain one of the texts."""
    return [left for job in jobs if (left := job.only(texts)) is not None]


def _prepare_file(path: Path, arguments: argparse.Namespace) -> None:
    """Prepare the file of records to be appended to; exit with code 2 if it cannot be."""
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


def _prepare(arguments: argparse.Namespace) -> None:
    """Let the frameworks share the card; exit with code 2 if nothing can be timed."""
    # torch and JAX share the card: JAX must not reserve most of it. Read when JAX starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    fraction = _memory_fraction(arguments)
    if fraction is not None:  # JAX runs implementations alone, so that its limit may stay
        os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # JAX refuses both
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(fraction)
    from interop.parity.environment import choose_device

    if arguments.device == "cpu":
        import jax

        jax.config.update("jax_platforms", "cpu")
    elif choose_device() == "cpu":
        arguments.refuse("expected a CUDA GPU that torch and JAX both see, found none")


def _memory_fraction(arguments: argparse.Namespace) -> float | None:
    """Return --memory-cap as a fraction of the GPU's memory."""
    import torch

    if arguments.memory_cap is None or not torch.cuda.is_available():
        return None
    total = torch.cuda.get_device_properties(0).total_memory / GIB
    if arguments.memory_cap > total:
        arguments.refuse(
            f"--memory-cap: expected up to the GPU's {total:.0f} GiB, got {arguments.memory_cap:g}"
        )
    return arguments.memory_cap / total


@contextmanager
def _torch_limit(fraction: float | None) -> Iterator[None]:
    """Limit torch to a fraction of the GPU's memory; None is no limit."""
    import torch

    if fraction is None:
        yield
        return
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _measure(
    name: str,
    arguments: argparse.Namespace,
    facts: dict[str, str],
    log: Path | None,
    journal: Journal,
) -> int:
    """Run one suite; return the exit code."""
    import torch

    from bench.peaks import peak_jobs
    from bench.timing import time_calls, wait_for
    from interop.parity.environment import choose_targets

    suite = load(name)
    jobs = _jobs(name, choose_targets(arguments.device, None), arguments.filter)
    jobs = _only(jobs, arguments.only)
    peaks = peak_jobs() if arguments.device == "cuda" else []
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.rule(suite.TITLE)
    console.print(*(f"{name} {value}" for name, value in facts.items()), sep=", ")
    reader = nvml_reader()

    def release() -> None:
        gc.collect()
        torch.cuda.empty_cache()

    limit = partial(_torch_limit, _memory_fraction(arguments))
    instruments = Instruments(time_calls, wait_for, lambda: Sampler(reader), release, limit)
    start = time.monotonic()
    gc.freeze()  # objects of the frameworks' import need no search after each job
    try:
        code = run_suite(
            [*peaks, *jobs], origin(name, facts), instruments, console, arguments.json,
            arguments.resume, log, journal,
        )  # fmt: skip
    finally:
        gc.unfreeze()
    console.print(f"{name}: {(time.monotonic() - start) / 60:.1f} minutes")
    return code


def _facts(device: str) -> dict[str, str]:
    """Return the facts of this run, the peers' versions among them."""
    import torch

    from interop.parity.environment import facts

    found = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    for package in PEER_PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return {name: str(value) for name, value in found.items()} | facts(device)
