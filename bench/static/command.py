"""``python -m bench static``: the table of what every shipped configuration takes."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.static.gate import DTYPES, FEATURES, FRAMEWORKS, Problem, Verdict, check, problems
from interop.contract.target import TARGETS


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to ``python -m bench``."""
    parser = commands.add_parser("static", help=__doc__, description=__doc__)
    parser.add_argument("--target", choices=TARGETS, default="sm80")
    parser.add_argument("--framework", choices=FRAMEWORKS, action="append", help="default: both")
    parser.add_argument("--feature", choices=FEATURES, action="append", help="default: all")
    parser.add_argument("--dtype", choices=sum(DTYPES.values(), ()), help="default: all")
    parser.add_argument("--head-dim", type=int, help="padded head size; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    parser.add_argument("--jobs", type=int, default=None, help="processes; default: one a core")
    parser.add_argument(
        "--try",
        dest="changes",
        type=_change,
        action="append",
        default=[],
        metavar="KERNEL:FIELD=N,...",
        help="change a kernel's configuration first, such as flash_fwd:block_q=64,num_warps=4",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compile, print the table; returns 1 when a kernel fails."""
    selected = [
        problem
        for framework in arguments.framework or FRAMEWORKS
        for problem in problems(framework, arguments.target)
        if problem.feature in (arguments.feature or FEATURES)
        and arguments.dtype in (None, problem.dtype)
        and arguments.head_dim in (None, problem.head_dim)
    ]
    console = Console()
    begin = time.perf_counter()
    verdicts = _check_all(selected, dict(arguments.changes), arguments.jobs, console)
    seconds = time.perf_counter() - begin
    console.print(_table(verdicts, arguments.target))
    failed = [verdict for verdict in verdicts if verdict.failures]
    console.print(
        f"{len(verdicts)} kernels compiled for {arguments.target} in {seconds:.0f} s, "
        f"{len(failed)} failed"
    )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(v) for v in verdicts], indent=1))
    return 1 if failed or not verdicts else 0


def _check_all(
    selected: Sequence[Problem],
    changes: dict[str, dict[str, int]],
    jobs: int | None,
    console: Console,
) -> list[Verdict]:
    context = get_context("spawn")  # JAX runs threads, which a fork does not survive
    with ProcessPoolExecutor(jobs, context, initializer=_use_no_gpu) as pool:
        results = pool.map(partial(check, changes=changes), selected)
        progress = track(results, "Compiling", total=len(selected), console=console, transient=True)
        return [verdict for verdicts in progress for verdict in verdicts]


def _use_no_gpu() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"


def _change(text: str) -> tuple[str, dict[str, int]]:
    kernel, _, fields = text.partition(":")
    return kernel, {
        name: int(value) for name, _, value in (field.partition("=") for field in fields.split(","))
    }


def _table(verdicts: Sequence[Verdict], target: str) -> Table:
    table = Table(
        "framework", "kernel", "dtype", "D", "feature", "q×kv", "warps", "stages",
        title=f"What each shipped configuration takes on {target}",
        caption="D: padded head size. Blocks: resident on a multiprocessor. "
        "Instructions: in the PTX.",
    )  # fmt: skip
    for heading in ("registers", "spilled B", "stack B", "shared B", "blocks"):
        table.add_column(heading, justify="right")
    for heading in ("mma", "wgmma", "cp.async", "ldmatrix"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for verdict in verdicts:
        problem, config, taken = verdict.problem, verdict.config, verdict.resources
        table.add_row(
            problem.framework,
            verdict.kernel,
            problem.dtype,
            str(problem.head_dim),
            problem.feature,
            f"{config.block_q}×{config.block_kv}",
            *map(str, (config.num_warps, config.num_stages, taken.registers)),
            f"{taken.spill_stores}/{taken.spill_loads}",
            *map(str, (taken.stack, taken.shared, taken.occupancy)),
            *map(str, (taken.mma, taken.wgmma, taken.cp_async, taken.ldmatrix)),
            "; ".join(verdict.failures) or "ok",
            style="red" if verdict.failures else "",
        )
    return table
