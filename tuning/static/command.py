"""List the resources of every shipped configuration; needs no GPU."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from itertools import cycle, groupby
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tuning.static.fuzz import Compilation, compilations, find_mistakes
from tuning.static.gate import (
    DTYPES,
    FAMILIES,
    FEATURES,
    FRAMEWORKS,
    Problem,
    Verdict,
    check,
    not_compiled,
    problems,
)
from tuning.static.sweep import FEATURES as SWEPT
from tuning.static.sweep import sweep
from tuning.workers import workers
from twin_attention.interop.parity.arguments import count
from twin_attention.interop.rendering.tables import NARROW, Grid, console_of, to_terminal
from twin_attention.targets.target import TARGETS

_WIDTH = 160  # of the tables, where a log has none
_WIDTH_OF_ALL = 140  # of all columns
_LABELS = ["kernel", "dtype", "D", "feature", "tile"]


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "static", help="list what shipped configurations take", description=__doc__
    )
    parser.add_argument("--target", choices=TARGETS, action="append", help="default: both")
    parser.add_argument("--framework", choices=FRAMEWORKS, action="append", help="default: both")
    parser.add_argument(
        "--feature",
        choices=FEATURES,
        action="append",
        metavar="NAME",
        help=f"of {', '.join(FEATURES)}; default: all",
    )
    parser.add_argument("--dtype", choices=sum(DTYPES.values(), ()), help="default: all")
    parser.add_argument(
        "--head-dim", type=int, metavar="N", help="padded head dimension; default: all"
    )
    parser.add_argument(
        "--every",
        type=count,
        default=1,
        metavar="N",
        help="compile one problem of N, of each feature; default: all",
    )
    parser.add_argument(
        "--alternate",
        action="store_true",
        help="compile a feature that both targets have for only one of them, by turns",
    )
    parser.add_argument(
        "--shared-memory",
        type=count,
        metavar="KIB",
        help="compile SM80 code for a card with so much of it a block, such as 99 of compute "
        "capability 8.6, 8.9 and 12.0; default: the target's own cards",
    )
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="instead: check that short lengths of every kind fit shared memory",
    )
    parser.add_argument(
        "--random",
        type=count,
        metavar="N",
        help="instead: compile the explicit kernels of N random problems, and list what a compiler "
        "crashes on or gets wrong",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of --random (default: 0)")
    parser.set_defaults(run=run, refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Return 1 if a kernel fails."""
    console = console_of(_WIDTH)
    begin = time.perf_counter()
    if arguments.sweep:
        return _sweep(arguments, console, begin)
    if arguments.random:
        return _fuzz(arguments, console, begin)
    selected = _select(arguments)
    verdicts = _check_all(_compiled_here(selected, console), console)
    seconds = time.perf_counter() - begin
    for (target, *names), of_table in groupby(verdicts, lambda v: _table_of(v.problem)):
        group, name = list(of_table), " ".join(names)
        is_narrow = console.width < _WIDTH_OF_ALL
        title = f"{name} on {target}: resources of a kernel"
        console.print(resource_table(group, title, is_narrow))
    failed = [verdict for verdict in verdicts if verdict.failures]
    for verdict in failed:
        fields = (verdict.kernel, *asdict(verdict.problem).values())
        name = " ".join(str(field) for field in fields if field is not None)
        console.print(f"{name}: {'; '.join(verdict.failures)}", style="red", soft_wrap=True)
    console.print(
        f"{len(verdicts)} kernels compiled for {' and '.join(arguments.target or TARGETS)} in "
        f"{seconds:.0f} s, {len(failed)} failed"
    )
    return 1 if failed or not verdicts else 0


def _select(arguments: argparse.Namespace) -> list[Problem]:
    found = _problems(arguments.target or TARGETS, arguments.framework or FRAMEWORKS)
    turns = _turns() if arguments.alternate else {}
    if arguments.shared_memory is not None:
        found = [problem for problem in found if problem.target == "sm80"]
        if not found:
            arguments.refuse("--shared-memory: expected --target sm80 beside it, got sm90")
        size = 1024 * arguments.shared_memory
        found = list(dict.fromkeys(replace(problem, shared_memory=size) for problem in found))
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
        and turns.get(problem.feature, problem.target) == problem.target
    ]
    if not selected:
        arguments.refuse(
            "expected --feature, --dtype and --head-dim that some kernel has together, got none"
        )
    chosen: set[Problem] = set()
    for _, group in groupby(sorted(selected, key=_feature_of), _feature_of):
        chosen.update([*group][:: arguments.every])
    return [problem for problem in selected if problem in chosen]


def _problems(targets: Iterable[str], frameworks: Iterable[str]) -> list[Problem]:
    return [
        problem
        for target in targets
        for framework in frameworks
        for family, targets_of_family in FAMILIES[framework].items()
        if target in targets_of_family
        for problem in problems(framework, target, family)
    ]


def _turns() -> dict[str, str]:
    """Return the target whose turn it is, for each feature that all targets have."""
    features = [{problem.feature for problem in _problems([x], FRAMEWORKS)} for x in TARGETS]
    shared = set.intersection(*features)
    return dict(zip((x for x in FEATURES if x in shared), cycle(TARGETS), strict=False))


def _feature_of(problem: Problem) -> tuple[str, str]:
    return problem.target, problem.feature


def _check_all(selected: Sequence[Problem], console: Console) -> list[Verdict]:
    """Begin with the explicit kernels, which take longest: no process then ends much later."""
    ordered = sorted(selected, key=lambda problem: problem.family == "triton")
    verdicts = dict(zip(ordered, _in_processes(check, ordered, console), strict=True))
    return [verdict for problem in selected for verdict in verdicts[problem]]


def _sweep(arguments: argparse.Namespace, console: Console, begin: float) -> int:
    selected = [
        problem
        for problem in _select(arguments)
        if problem.family == "triton" and problem.feature in SWEPT
    ]
    results = _in_processes(sweep, selected, console)
    seconds = time.perf_counter() - begin
    misfits = [misfit for _, found in results for misfit in found]
    for misfit in misfits:
        style = "red" if misfit.refused else ""
        console.print(f"{misfit.spec} in {misfit.row}: {misfit.outcome}", style=style)
    refused = sum(misfit.refused for misfit in misfits)
    console.print(
        f"{sum(number for number, _ in results)} problems compiled in {seconds:.0f} s: "
        f"{len(misfits) - refused} kernels take fewer stages, {refused} problems are refused"
    )
    return 1 if refused or not results else 0


def _fuzz(arguments: argparse.Namespace, console: Console, begin: float) -> int:
    selected = [
        each
        for target in arguments.target or TARGETS
        for framework in arguments.framework or FRAMEWORKS
        for each in compilations(framework, target, arguments.random, arguments.seed)
    ]
    selected = _compiled_here(selected, console)
    results = _in_processes(find_mistakes, selected, console)
    mistakes = [mistake for _, found in results for mistake in found]
    for mistake in mistakes:
        console.print(str(mistake), style="red", soft_wrap=True, markup=False)
    console.print(
        f"{sum(number for number, _ in results)} kernels of {arguments.random} random problems "
        f"compiled in {time.perf_counter() - begin:.0f} s, {len(mistakes)} failed"
    )
    return 1 if mistakes else 0


def _compiled_here(selected: Sequence[Any], console: Console) -> list[Any]:
    reasons = [not_compiled(problem) for problem in selected]
    pairs = list(zip(selected, reasons, strict=True))
    for name, reason in dict.fromkeys((_table_of(x), reason) for x, reason in pairs):
        if reason is not None:
            target, framework, family = name
            console.print(f"{framework} {family} on {target}, not compiled: {reason}")
    return [problem for problem, reason in pairs if reason is None]


def _in_processes(
    function: Callable[[Any], Any], selected: Sequence[Any], console: Console
) -> list[Any]:
    found = []
    # JAX's CUDA plugin assembles for one target per process.
    for target in dict.fromkeys(each.target for each in selected):
        of_target = [each for each in selected if each.target == target]
        with workers() as pool:
            results = pool.map(function, of_target)
            title, total = f"Compiling for {target}", len(of_target)
            found += track(results, title, total=total, console=console, transient=True)
    return found


def resource_table(verdicts: Iterable[Verdict], title: str, is_narrow: bool = False) -> Table:
    titles = [*_LABELS, "warps×\nstages", "regis-\nters", "spilled\nbytes", "shared\nbytes",
              "blocks", "mma", "wgmma", "cp.\nasync", "ld-\nmatrix", "ex2", "verdict"]  # fmt: skip
    grid, styles = [titles], []
    for verdict in verdicts:
        config, taken = verdict.config, verdict.resources
        numbers = (taken.shared, taken.occupancy, taken.mma, taken.wgmma,
                   taken.cp_async + taken.tma, taken.ldmatrix, taken.ex2)  # fmt: skip
        grid.append([
            *_label(verdict), f"{config.num_warps}×{config.num_stages}", str(taken.registers),
            f"{taken.spill_stores}/{taken.spill_loads}", *map(str, numbers),
            "fails" if verdict.failures else "ok",
        ])  # fmt: skip
        styles.append("red" if verdict.failures else "")
    caption = (
        "D: padded head dimension. Spilled: by stores and loads; fails triton on sm80, and the "
        "others where the main loop spills a tile. "
        "Blocks: resident on an SM. mma to ex2: instructions in the PTX, TMA's with cp.async."
    )
    if is_narrow:
        grid = _without(grid, "tile", "warps×\nstages", "blocks", "mma", "wgmma", "cp.\nasync",
                        "ld-\nmatrix", "ex2", "verdict")  # fmt: skip
    options = NARROW if is_narrow else {}
    return to_terminal(grid, styles, title=title, caption=caption, **options)


def _without(grid: Grid, *titles: str) -> Grid:
    kept = [place for place, title in enumerate(grid[0]) if title not in titles]
    return [[row[place] for place in kept] for row in grid]


def _table_of(problem: Problem | Compilation) -> tuple[str, ...]:
    return problem.target, problem.framework, problem.family


def _label(verdict: Verdict) -> tuple[str, ...]:
    problem, config = verdict.problem, verdict.config
    feature = problem.feature
    if problem.shared_memory is not None:
        feature += f", {problem.shared_memory // 1024} KiB"
    return verdict.kernel, problem.dtype, str(problem.head_dim), feature, config.tile
