"""Search for better configurations on this GPU and write the tables.

A row changes only if the winner, timed once more, beats it by more than the noise. Ctrl-C keeps the
finished rows.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from functools import partial
from pathlib import Path

from tuning.search import survey
from tuning.search.cases import TimedCase
from tuning.search.search import Found, Run, Tools, show, tune
from tuning.search.space import TUNED
from tuning.search.table import ConfigTable, Row
from tuning.workers import workers
from twin_attention.interop.rendering.tables import console_of
from twin_attention.targets.config import table_path
from twin_attention.targets.kernels import KernelConfig
from twin_attention.targets.target import TARGETS

VERSIONS = {"torch_attn": ("torch", "triton"), "pallas_attn": ("jax", "triton")}
INTERRUPTED = 130  # the exit code
_WIDTH = 120  # of what is printed, where a log has none


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "search", help="search for better configurations, on a GPU", description=__doc__
    )
    parser.add_argument("--side", choices=VERSIONS, required=True, help="whose table")
    parser.add_argument("--target", choices=TARGETS, required=True, help="which of its tables")
    parser.add_argument(
        "--kernel",
        choices=TUNED,
        action="append",
        metavar="NAME",
        help=f"of {', '.join(TUNED)}; default: all",
    )
    parser.add_argument("--head-dim", type=int, metavar="N", help="of the rows; default: all")
    parser.add_argument("--dtype-bits", type=int, metavar="N", help="of the rows; default: all")
    parser.add_argument(
        "--when", metavar="TEXT", help="condition of the rows, such as softcap; default: all"
    )
    parser.add_argument(
        "--limit-seconds",
        type=float,
        metavar="N",
        default=float("inf"),
        help="begin no candidate later than that; each row has an even share",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what compiling leaves of the space and change nothing; needs no GPU",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the table to write, a copy of the package's at first; default: the package's own",
    )
    parser.set_defaults(run=run, refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    shipped = table_path(arguments.side, arguments.target)
    output = arguments.output or shipped
    table = ConfigTable((output if output.exists() else shipped).read_text())
    rows = list(select(table, arguments))
    if not rows:
        arguments.refuse("expected options that leave a row of the table, got none")
    if not arguments.dry_run:
        _find_gpu(arguments)
    side, target, console = arguments.side, arguments.target, console_of(_WIDTH)
    try:
        with workers() as pool:
            if arguments.dry_run:
                compiles = partial(survey.survey, pool, table, side, target, None)
                show(table, target, rows, compiles, console)
            else:
                tools = _gpu_tools(pool, table, side, target)
                tune(table, target, rows, tools, output, arguments.limit_seconds, console)
    except KeyboardInterrupt:
        console.print("Interrupted; the rows that were finished are kept.")
        return INTERRUPTED
    return 0


def select(table: ConfigTable, arguments: argparse.Namespace) -> Iterator[Row]:
    sizes = {"head_dim": arguments.head_dim, "dtype_bits": arguments.dtype_bits}
    for kernel in arguments.kernel or TUNED:
        for row in table.rows(kernel):
            key = dict(row.key)
            if all(size in (None, key.get(name)) for name, size in sizes.items()) and (
                arguments.when in (None, key.get("when"))
            ):
                yield row


def _find_gpu(arguments: argparse.Namespace) -> None:
    """Let the frameworks share the card; exit with code 2 if it cannot run the target."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # read when JAX starts
    from twin_attention.interop.parity.environment import choose_device, choose_targets

    if choose_device() == "cpu":
        arguments.refuse("expected a CUDA GPU that torch and JAX both see, or --dry-run")
    try:
        choose_targets("cuda", arguments.target)
    except NotImplementedError as error:
        arguments.refuse(str(error))


def _gpu_tools(pool: Executor, table: ConfigTable, side: str, target: str) -> Tools:
    import torch

    from bench.timing import time_calls
    from tuning.search.trial import Trials
    from twin_attention.interop.parity.environment import facts

    known = facts("cuda")
    where = [known["device"].partition(" (")[0], *(f"{x} {known[x]}" for x in VERSIONS[side])]
    major, minor = torch.cuda.get_device_capability()

    def calls(row: Row, case: TimedCase) -> Callable[[KernelConfig], Run]:
        gc.collect()  # the last row's tensors
        torch.cuda.empty_cache()
        return Trials(side, target, row.kernel, case).call

    def note(found: Found) -> str:
        return f"{known['date'][:10]} on {', '.join(where)}: {found}"

    compiles = partial(survey.survey, pool, table, side, target, f"sm{major}{minor}")
    return Tools(compiles, calls, time_calls, note)
