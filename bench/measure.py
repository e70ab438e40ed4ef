"""Measure a suite's jobs on this machine's device, for all commands."""

from __future__ import annotations

import gc
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from bench.first import FirstCallJob
from bench.journal import VARIABLE, Journal
from bench.records import origin
from bench.registry import SUITES
from bench.runner import NO_JOURNAL, AnyJob, Instruments, run_suite
from bench.sampling import Sampler, card, nvml_reader
from twin_attention.interop.parity.arguments import Refuse
from twin_attention.interop.rendering.tables import console_of

GIB = 2**30
PEER_PACKAGES = (
    "dew-flash-attn-cu13", "fa3-fwd", "fa4-jax", "ffpa-attn", "flash-attn-4", "flashinfer-python",
    "jvp-flash-attention", "nvidia-cudnn-frontend", "tokamax", "tokenspeed-flashmla",
    "transformers",
)  # fmt: skip
_LOG_WIDTH = 160  # of tables where nothing says how wide the output is


class Setting(NamedTuple):
    """Where a run measures; `memory` is a fraction of the GPU's, for an implementation."""

    device: str
    facts: dict[str, str]
    card: dict[str, Any] | None = None
    path: Path | None = None
    resume: bool = False
    memory: float | None = None
    journal: Journal = NO_JOURNAL


def open_journal() -> Journal:
    return Journal(Path(os.environ[VARIABLE])) if VARIABLE in os.environ else NO_JOURNAL


def prepare(refuse: Refuse, device: str = "cuda", memory_cap: float | None = None) -> Setting:
    """Let the frameworks share the card, or refuse; `memory_cap` is GiB for an implementation."""
    # JAX, when it starts, must not reserve most of the shared card.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    memory = _memory_fraction(refuse, memory_cap)
    if memory is not None:  # JAX runs implementations alone, so that its limit may stay
        os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)  # JAX refuses both
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(memory)
    from twin_attention.interop.parity.environment import choose_device, choose_targets

    if device == "cpu":
        import jax

        jax.config.update("jax_platforms", "cpu")
    elif choose_device() == "cpu":
        refuse(f"expected a CUDA GPU that torch and JAX both see, found {_who_sees_one()}")
    try:
        choose_targets(device, None)
    except NotImplementedError as error:  # an older card
        refuse(str(error))
    found = card() if device == "cuda" else None
    # Once, because a versioned file of records changes while it is written.
    return Setting(device, facts(device), found, memory=memory, journal=open_journal())


def _who_sees_one() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none"
    return f"{torch.cuda.get_device_name()}, which JAX does not see (pip install 'jax[cuda13]')"


def _memory_fraction(refuse: Refuse, cap: float | None) -> float | None:
    import torch

    if cap is None or not torch.cuda.is_available():
        return None
    total = torch.cuda.get_device_properties(0).total_memory / GIB
    if cap > total:
        refuse(f"--memory-cap: expected up to the GPU's {total:.0f} GiB, got {cap:g}")
    return cap / total


@contextmanager
def _torch_limit(fraction: float | None) -> Iterator[None]:
    import torch

    if fraction is None:
        yield
        return
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def release_memory() -> None:
    """Free what nobody refers to; end the process if an implementation broke its CUDA context."""
    import torch

    gc.collect()
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.set_device(0)  # JAX on several devices leaves another one current
        torch.cuda.empty_cache()
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        os.abort()  # `journal.supervise` goes on in a new process


def measure(
    name: str,
    jobs: Sequence[AnyJob],
    setting: Setting,
    deadline: float = math.inf,
    quiet: bool = False,
) -> int:
    """Measure a suite's jobs after the device's peaks; return the exit code."""
    from bench.peaks import peak_jobs
    from bench.timing import time_calls, wait_for

    uses_card = not all(isinstance(job, FirstCallJob) for job in jobs)
    peaks = peak_jobs() if setting.device == "cuda" and uses_card else []
    console = console_of(_LOG_WIDTH)
    console.rule(SUITES[name].title)
    if not quiet:
        console.print(*(f"{name} {value}" for name, value in setting.facts.items()), sep=", ")
    reader = nvml_reader()

    limit = partial(_torch_limit, setting.memory)
    instruments = Instruments(time_calls, wait_for, lambda: Sampler(reader), release_memory, limit)
    start = time.monotonic()
    gc.freeze()  # objects of the frameworks' import need no search after each job
    try:
        code = run_suite(
            [*peaks, *jobs], origin(name, setting.facts, setting.card), instruments, console,
            setting.path, setting.resume, setting.journal, deadline, quiet,
        )  # fmt: skip
    finally:
        gc.unfreeze()
    console.print(f"{name}: {(time.monotonic() - start) / 60:.1f} minutes")
    return code


def facts(device: str) -> dict[str, str]:
    import torch

    from twin_attention.interop.parity import environment

    found = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    for package in PEER_PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return {name: str(value) for name, value in found.items()} | environment.facts(device)
