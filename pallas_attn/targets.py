from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from twin_attention.targets.kernels import KernelConfig
from twin_attention.targets.target import (
    NUM_SMS,
    SHARED_MEMORY_LIMIT,
    requested_target,
    resolve_target,
)

Device = Any  # a jax.Device, which type checkers take for a variable
Noted = dict[str, tuple[str, KernelConfig]]
_described: ContextVar[tuple[Device, Noted] | None] = ContextVar("described", default=None)


@contextmanager
def described(card: Device) -> Iterator[Noted]:
    """Choose code for a card that this machine lacks.

    Yields a dict from each Mosaic kernel's name in the code to its name in the tables and its
    configuration.
    """
    configs: Noted = {}
    token = _described.set((card, configs))
    try:
        yield configs
    finally:
        _described.reset(token)


def note_config(name: str, config: KernelConfig, kernel_name: str | None = None) -> None:
    """Tell `described` a kernel's configuration; kernel_name is as `name` if None."""
    if (found := _described.get()) is not None:
        found[1][kernel_name or name] = name, config


def cuda_devices() -> Sequence[Device]:
    """Return this process's CUDA devices, if any, or the one that is `described`."""
    if (found := _described.get()) is not None:
        return (found[0],)
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:  # this process has no CUDA backend
        return ()


def compiled_for() -> Device | None:
    """Return a device to compile kernels for before XLA chooses one, or None.

    It is None in one of several processes, which must compile the same programs together.
    """
    if _described.get() is not None:
        return None
    devices = cuda_devices()
    alike = len({device.compute_capability for device in devices}) == 1
    return devices[0] if alike and jax.process_count("cuda") == 1 else None


def target_of(device: Device | None) -> str:
    """Return the target whose code runs where operands on `device` are lowered for CUDA.

    If `device` is no CUDA device, it is that of the process's first one; without any, the target
    that was asked for, or "sm80".
    """
    cuda = cuda_devices()
    if not cuda:
        return requested_target() or "sm80"
    gpu: Device = device if device in cuda else cuda[0]
    major, minor = gpu.compute_capability.split(".")
    return resolve_target((int(major), int(minor)))


def capability(target: str) -> int:
    """Return the compute capability to compile for: the device's, or the target's."""
    devices = cuda_devices()
    name = devices[0].compute_capability if devices else target.removeprefix("sm")
    return int(name.replace(".", ""))


def shared_memory(target: str) -> int:
    """Return the bytes that a block may have: the target's limit, or a smaller card's own."""
    cards = [device.shared_memory_per_block_optin for device in cuda_devices()]
    return min([SHARED_MEMORY_LIMIT[target], *cards])


def num_sms(target: str | None) -> int:
    """Return the device's number of SMs; without a device, that of the target's usual card."""
    devices = cuda_devices()
    if target is None or not devices:
        return NUM_SMS[target or "sm80"]
    return devices[0].core_count
