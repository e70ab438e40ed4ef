"""Compile the Triton kernels of one problem for a target, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from interop.contract.config import KernelConfig
from interop.contract.spec import AttentionSpec
from torch_attn import launch
from torch_attn.kernels.flash_bwd import flash_bwd
from torch_attn.kernels.flash_fwd import flash_fwd


def compile_kernels(
    spec: AttentionSpec, target: str, configs: Mapping[str, KernelConfig]
) -> list[tuple[str, KernelConfig, Any]]:
    """Compile forward and backward as `torch_attn` launches them.

    Args:
        configs: the configuration of each kernel, in place of the shipped one.

    Returns:
        Each kernel's name, its configuration and what Triton compiled.
    """
    dtype = getattr(torch, spec.dtype)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q = empty(spec.batch, spec.seq_q, spec.heads_q, spec.head_dim)
    k = empty(spec.batch, spec.seq_kv, spec.heads_kv, spec.head_dim)
    v = empty(spec.batch, spec.seq_kv, spec.heads_kv, spec.head_dim_v)
    with (
        _driver(target),
        mock.patch.object(launch, "configs_for", return_value=configs),
        launch.recording(target) as compiled,
    ):
        out, lse = flash_fwd(q, k, v, spec)
        flash_bwd(out, lse, q, k, v, out, lse, spec)
    return compiled


class _Driver:
    """As much of a Triton driver as compiling takes."""

    def __init__(self, target: str) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(self.target.removeprefix("sm")), 32)

    def get_current_device(self) -> str:
        return self.target  # a key of the kernels' caches, which never is a real device's

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def _driver(target: str) -> Iterator[None]:
    """Make Triton compile for `target`, whatever the machine has.

    Restores the private ``driver._active``: the public `reset_active` asks for a GPU.
    """
    before = driver._active
    driver.set_active(cast(Any, _Driver(target)))
    try:
        yield
    finally:
        driver._active = before
