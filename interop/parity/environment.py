"""Find devices and targets, and a report's facts: device, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
import torch

from twin_attention.targets.target import requested_target, resolve_target, use_target

MOST_JOBS = {"cuda": 14, "cpu": 4}

# Options of `jax.jit` that restore the rounding that `compile_quickly` changes.
BITWISE: dict[str, bool] = (
    {"xla_cpu_use_fusion_emitters": True} if jax.__version_info__ < (0, 11) else {}
)


def compile_quickly() -> None:
    """Let XLA optimise little if there is no GPU; call it before JAX's first operation.

    Without its fusion emitters XLA compiles faster, but may round a kernel differently in two
    programs; `BITWISE` restores them. From jax 0.11 on they are always used.
    """
    if not torch.cuda.is_available():
        quick = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
        if BITWISE:
            quick += " --xla_cpu_use_fusion_emitters=false"
        os.environ["XLA_FLAGS"] = f"{quick} {os.environ.get('XLA_FLAGS', '')}".rstrip()


def choose_device() -> str:
    """Return "cuda" if both frameworks see a GPU, else "cpu".

    JAX's default GPU becomes torch's current one, because JAX's start changes that.
    """
    if not torch.cuda.is_available() or jax.default_backend() != "gpu":
        return "cpu"
    torch.cuda.set_device(jax.local_devices()[0].local_hardware_id)
    return "cuda"


def choose_targets(device: str, target: str | None) -> tuple[str | None, ...]:
    """Return the targets to run: the one asked for, or all of the device; (None,) on a CPU.

    Raises:
        ValueError: a target was asked for on a CPU.
        NotImplementedError: the device cannot run the target.
    """
    if device == "cpu":
        if target is not None:
            raise ValueError(f"target: expected None without a GPU, got {target!r}")
        return (None,)
    target = target or requested_target()
    capability = torch.cuda.get_device_capability()
    if target is None and capability[0] == 9:
        return ("sm90", "sm80")
    with use_target(target):
        return (resolve_target(capability),)


def choose_jobs(device: str, suite: str, cases: int) -> int:
    """Return the number of processes; 1 for "large", whose cases may take most of a card."""
    if suite == "large":
        return 1
    cores = os.cpu_count() or 1
    return max(1, min(MOST_JOBS[device], cores, cases // 2))


def facts(device: str) -> dict[str, str]:
    versions = {name: _version(name) for name in ("torch", "jax", "triton", "numpy")}
    return {
        "device": _device_name(device),
        "python": platform.python_version(),
        **versions,
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _device_name(device: str) -> str:
    if device == "cpu":
        return f"CPU ({platform.machine()}, {os.cpu_count()} cores)"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (compute capability {major}.{minor})"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """Return TWIN_ATTENTION_COMMIT, for a copy without history, or git's commit."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    if given := os.environ.get("TWIN_ATTENTION_COMMIT"):
        return given
    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        code = (":/", ":(top,exclude)bench/results")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", *code)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit} with local changes" if changed else commit
