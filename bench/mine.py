"""Measure this card in five minutes, and write one file that anyone may send.

What does not fit into the time is skipped. The file has no name of a user or a host, no path, and
no number of the card.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.console import Console

from bench.anonymous import to_bytes
from bench.journal import start_of_run
from bench.measure import measure, prepare
from bench.ours import FAMILY_NAMES
from bench.records import append
from bench.records import load as read
from bench.registry import load
from bench.report.cards import CAPTION, cards
from bench.runner import INTERRUPTED, AnyJob
from twin_attention.interop.parity.arguments import make_folder
from twin_attention.interop.rendering.tables import NARROW, to_terminal

PEERS = (
    "FA2", "FA3", "FA4", "cuDNN", "FA2 dense", "cuDNN dense", "FlashInfer", "FA2 varlen",
    "FA3 varlen", "FA4 varlen", "cuDNN padded", "jax FA3", "jax FA3 varlen",
)  # fmt: skip
SECONDS = 300  # no problem is begun that would end later
NAMES = {*FAMILY_NAMES, "torch triton graph", *PEERS}


class Part(NamedTuple):
    """Some problems of a suite, done by `until`, a share of the whole time."""

    suite: str
    until: float
    cases: tuple[str, ...] | None = None


PARTS = (
    Part("flash", 0.6, (
        "4x4096x16x128-causal", "4x4096x32x64-causal", "4x4096x16x128", "1x16384x16x128-causal",
        "32x512x16x128-causal", "4x4096x8x256-causal",
    )),
    Part("kvcache", 0.8, ("64x8192-heads-32-8", "1x32768-heads-32-8", "64x1024-heads-32-8")),
    Part("packed", 1.0, ("lognormal-16384-d128", "lognormal-16384-d64")),
)  # fmt: skip
SEND = (
    "It has nothing personal: the card, its clocks, limits and driver, versions and the commit. "
    "`python -m bench report FILE` makes a page of it, of several cards as well. To add this card "
    "to the published ones, open an issue with the form 'Measured card' and attach the file."
)


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "mine", help="measure this card in five minutes, into one file", description=__doc__
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("reports"),
        metavar="FOLDER",
        help="where the file goes (default: reports)",
    )
    parser.set_defaults(run=run, refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Return 1 if a result is wrong."""
    setting = prepare(arguments.refuse)
    make_folder(arguments.refuse, "--output", arguments.output)
    from twin_attention.interop.parity.environment import choose_targets

    target, *_ = choose_targets("cuda", None)
    code, start = 0, start_of_run()
    with TemporaryDirectory() as own:
        path = (setting.journal.folder or Path(own)) / "mine.jsonl"
        append(path, setting.journal.crashed)
        setting = setting._replace(path=path)
        for part in PARTS:
            deadline = start + part.until * SECONDS
            code = measure(part.suite, chosen(part, target), setting, deadline=deadline, quiet=True)
            if code == INTERRUPTED:
                break
        records = read(path)
    file = arguments.output / f"mine-{name_of(setting.facts)}.jsonl.gz"
    file.write_bytes(to_bytes(records))
    console = Console()
    for card in cards(records):
        console.print()
        for name, text in card.facts.items():
            console.print(f"{name}: {text}", highlight=False, markup=False)
        console.print(to_terminal(card.grid, caption=CAPTION, **NARROW))
    skipped = dict.fromkeys(r.case["name"] for r in records if r.status == "skipped")
    if skipped:
        console.print(f"Skipped, as the time was up: {', '.join(skipped)}", highlight=False)
    console.print(f"\nwrote {file}", highlight=False, soft_wrap=True, markup=False)
    console.print(SEND, highlight=False, markup=False)
    return code or int(any(r.status == "refused by parity" and not r.is_peer for r in records))


def chosen(part: Part, target: str | None) -> list[AnyJob]:
    jobs = load(part.suite).jobs((target,))
    names = part.cases or tuple(dict.fromkeys(job.case["name"] for job in jobs))
    return [_compared(job) for name, job in product(names, jobs) if job.case["name"] == name]


def _compared(job: Any) -> AnyJob:
    kept = {s: make for s, make in job.factories.items() if s.implementation in NAMES}
    return replace(job, factories=kept)


def name_of(facts: dict[str, str]) -> str:
    """Return the card and the commit for a file's name.

    >>> name_of({"device": "NVIDIA A30 (compute capability 8.0)", "commit": "0123456789ab"})
    'nvidia-a30-0123456789ab'
    """
    device = facts["device"].partition(" (")[0]
    return re.sub(r"[^a-z0-9]+", "-", f"{device} {facts['commit']}".lower()).strip("-")
