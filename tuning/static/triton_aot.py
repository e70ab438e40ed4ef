"""Compile the Triton or Gluon kernels of one problem for a target, without a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from torch_attn import launch
from tuning.static.operands import operands_of, run_kernels
from twin_attention.contract.paged_spec import AppendSpec, DecodeSpec
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import FAMILIES, Backend
from twin_attention.targets.kernels import KernelConfig


def compile_kernels(
    spec: AttentionSpec | DecodeSpec | AppendSpec,
    target: str,
    limit: Callable[[str], float] = lambda kernel: math.inf,
    sinks: bool = False,
    device: str | None = None,
    family: str = "triton",
    tangents: bool = False,
) -> list[tuple[str, KernelConfig, Any]]:
    """Compile a problem's kernels as `torch_attn` launches them, for both kinds of backwards.

    With tangents compile forward mode in place of backwards.

    Raise NotImplementedError if the explicit kernels do not cover the problem.

    limit: bytes of shared memory per block, reached with fewer pipeline stages if need be.
    device: what to assemble for; the target's own devices by default.
    """
    folders = "portable", target
    (chosen,) = (x for x in FAMILIES["torch_attn"] if x.name == family and x.folder in folders)
    if chosen.folder == target and isinstance(spec, AttentionSpec):
        operation = "partial_fwd" if spec.is_part else "flash_fwd"
        if reason := chosen.supports(operation, spec, target):
            raise NotImplementedError(f"{family} on {target}: {reason}")
    with _driver(device or target), launch.recording(limit) as compiled:
        operands = operands_of(spec, _empty, sinks)
        run_kernels(spec, Backend(chosen, target), *operands, tangents=tangents)
    return list({(name, x.hash): (name, config, x) for name, config, x in compiled}.values())


def _empty(dtype: str, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


class _Driver:
    def __init__(self, device: str) -> None:
        self.device = device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(self.device.removeprefix("sm")), 32)

    def get_current_device(self) -> tuple[str, Any]:
        """Return a key of the kernels' caches: no real device's, and another with other stages."""
        return self.device, knobs.runtime.add_stages_inspection_hook

    def get_current_stream(self, device: tuple[str, Any]) -> int:
        return 0


@contextmanager
def _driver(device: str) -> Iterator[None]:
    """Make Triton compile for `device`, whatever the machine has.

    Restores the private ``driver._active``: the public `reset_active` asks for a GPU.
    """
    before = driver._active
    driver.set_active(cast(Any, _Driver(device)))
    try:
        yield
    finally:
        driver._active = before
