"""``python -m tuning static``: what every shipped configuration takes, and what bounds it."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from interop.parity.arguments import count, make_folder
from tuning.static.gate import DTYPES, FEATURES, FRAMEWORKS, Problem, Verdict, check, problems
from tuning.static.sweep import rows, sweep
from twin_attention.targets.target import TARGETS

_WIDTH = 160  # of the tables, where a log has none


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to ``python -m tuning``."""
    parser = commands.add_parser("static", help=__doc__, description=__doc__)
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: both")
    parser.add_argument("--framework", choices=FRAMEWORKS, action="append", help="default: both")
    parser.add_argument("--feature", choices=FEATURES, action="append", help="default: all")
    parser.add_argument("--dtype", choices=sum(DTYPES.values(), ()), help="default: all")
    parser.add_argument("--head-dim", type=int, help="padded head size; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there as well")
    parser.add_argument("--jobs", type=count, metavar="N", help="processes; default: one a core")
    parser.add_argument(
        "--try",
        dest="changes",
        type=_change,
        action="append",
        default=[],
        metavar="KERNEL:FIELD=N,...",
        help="change a kernel's configuration first, such as flash_fwd:block_q=64,num_warps=4",
    )
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="instead: check that short lengths of every kind fit shared memory",
    )
    parser.set_defaults(run=run, refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Compile, print the tables; returns 1 when a kernel fails."""
    if arguments.sweep:
        return run_sweep(arguments)
    targets = arguments.target or TARGETS
    selected = _select(targets, arguments)
    if arguments.json:
        make_folder(arguments.refuse, "--json", arguments.json.parent)
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH
    begin = time.perf_counter()
    verdicts = _check_all(selected, dict(arguments.changes), arguments.jobs, console)
    seconds = time.perf_counter() - begin
    for (target, framework), group in groupby(
        verdicts, lambda verdict: (verdict.problem.target, verdict.problem.framework)
    ):
        group = list(group)
        console.print(resource_table(group, f"{framework} on {target}: what a kernel takes"))
        console.print(bound_table(group, f"{framework} on {target}: what bounds a tile"))
    failed = [verdict for verdict in verdicts if verdict.failures]
    for verdict in failed:
        name = " ".join(map(str, (verdict.kernel, *asdict(verdict.problem).values())))
        console.print(f"{name}: {'; '.join(verdict.failures)}", style="red", soft_wrap=True)
    console.print(
        f"{len(verdicts)} kernels compiled for {' and '.join(targets)} in {seconds:.0f} s, "
        f"{len(failed)} failed"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(v) for v in verdicts], indent=1))
    return 1 if failed or not verdicts else 0


def _select(targets: Sequence[str], arguments: argparse.Namespace) -> list[Problem]:
    """Return the problems that the options leave; exit with code 2 where they leave none."""
    found = [
        problem
        for target in targets
        for framework in arguments.framework or FRAMEWORKS
        for problem in problems(framework, target)
    ]
    sizes = sorted({problem.head_dim for problem in found})
    if arguments.head_dim not in (None, *sizes):
        names = ", ".join(map(str, sizes))
        arguments.refuse(f"--head-dim: expected one of {names}, got {arguments.head_dim}")
    selected = [
        problem
        for problem in found
        if problem.feature in (arguments.feature or FEATURES)
        and arguments.dtype in (None, problem.dtype)
        and arguments.head_dim in (None, problem.head_dim)
    ]
    if not selected:
        arguments.refuse(
            "expected --feature, --dtype and --head-dim that some kernel has together, got none"
        )
    return selected


def _check_all(
    selected: Sequence[Problem],
    changes: dict[str, dict[str, int]],
    jobs: int | None,
    console: Console,
) -> list[Verdict]:
    results = _in_processes(partial(check, changes=changes), selected, jobs, console)
    return [verdict for verdicts in results for verdict in verdicts]


def run_sweep(arguments: argparse.Namespace) -> int:
    """Compile problems of short lengths, list those that do not fit as configured; returns 1 when
    one is refused.
    """
    selected = [
        row
        for row in rows()
        if row.target in (arguments.target or TARGETS)
        and row.framework in (arguments.framework or FRAMEWORKS)
        and arguments.dtype in (None, row.dtype)
        and arguments.head_dim in (None, row.head_dim)
    ]
    console = Console()
    begin = time.perf_counter()
    results = list(_in_processes(sweep, selected, arguments.jobs, console))
    seconds = time.perf_counter() - begin
    misfits = [misfit for _, found in results for misfit in found]
    for misfit in misfits:
        style = "red" if misfit.refused else ""
        console.print(f"{misfit.spec} in {misfit.row}: {misfit.outcome}", style=style)
    problems_compiled, refused = sum(count for count, _ in results), sum(m.refused for m in misfits)
    console.print(
        f"{problems_compiled} problems compiled in {seconds:.0f} s: "
        f"{len(misfits) - refused} kernels take fewer stages, {refused} problems are refused"
    )
    return 1 if refused or not results else 0


def _in_processes(
    function: Callable[[Any], Any], selected: Sequence[Any], jobs: int | None, console: Console
) -> Iterator[Any]:
    context = get_context("spawn")  # JAX runs threads, which a fork does not survive
    with ProcessPoolExecutor(jobs, context, initializer=_use_no_gpu) as pool:
        results = pool.map(function, selected)
        yield from track(results, "Compiling", total=len(selected), console=console, transient=True)


def _use_no_gpu() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"


def _change(text: str) -> tuple[str, dict[str, int]]:
    kernel, _, fields = text.partition(":")
    pairs = (field.partition("=") for field in fields.split(","))
    try:
        return kernel, {name: int(value) for name, _, value in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected KERNEL:FIELD=N,..., got {text!r}") from None


def resource_table(verdicts: Iterable[Verdict], title: str) -> Table:
    """The resources of each kernel, a row each."""
    table = _table(
        title,
        caption="D: padded head size. Spilled: by stores and loads; fails on sm80, only reported "
        "on sm90. Blocks: resident on a multiprocessor. mma to ex2: instructions in the PTX.",
    )
    for heading in (
        "warps×\nstages", "regis-\nters", "spilled\nbytes", "shared\nbytes", "blocks",
        "mma", "wgmma", "cp.\nasync", "ld-\nmatrix", "ex2",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for verdict in verdicts:
        config, taken = verdict.config, verdict.resources
        table.add_row(
            *_label(verdict),
            f"{config.num_warps}×{config.num_stages}",
            str(taken.registers),
            f"{taken.spill_stores}/{taken.spill_loads}",
            *map(str, (taken.shared, taken.occupancy)),
            *map(str, (taken.mma, taken.wgmma, taken.cp_async, taken.ldmatrix, taken.ex2)),
            "fails" if verdict.failures else "ok",
            style="red" if verdict.failures else "",
        )
    return table


def bound_table(verdicts: Iterable[Verdict], title: str) -> Table:
    """The bound of each kernel's tile; features that leave both as they are share a row."""
    table = _table(
        title,
        caption="Of one step of the inner loop, or of one program where there is no loop. Cycles: "
        "of one multiprocessor, for each resource alone (tuning/static/bound.py). Peak: the most "
        "that the bound leaves of the multiplying units' rate. A feature that changes nothing has "
        "no row.",
    )
    for heading in (
        "bytes", "kFLOP", "FLOP/B", "multiply\ncycles", "special\ncycles", "load\ncycles",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    table.add_column("bound")
    table.add_column("peak", justify="right")
    shown = set()
    for verdict in verdicts:
        problem, limits = verdict.problem, verdict.bound
        row = (verdict.kernel, problem.dtype, problem.head_dim, verdict.config, limits.tile)
        if row in shown:
            continue
        shown.add(row)
        multiply, special, load = limits.cycles.values()
        table.add_row(
            *_label(verdict),
            str(limits.tile.bytes),
            f"{limits.tile.flops / 1000:.0f}",
            f"{limits.intensity:.1f}",
            *(f"{cycles:.0f}" for cycles in (multiply, special, load)),
            limits.limit,
            f"{multiply / limits.cycles[limits.limit]:.0%}",
        )
    return table


def _table(title: str, caption: str) -> Table:
    return Table(
        "kernel", "dtype", "D", "feature", "tile",
        title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False,
    )  # fmt: skip


def _label(verdict: Verdict) -> tuple[str, ...]:
    problem, config = verdict.problem, verdict.config
    return verdict.kernel, problem.dtype, str(problem.head_dim), problem.feature, config.tile
