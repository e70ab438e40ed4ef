"""Which code a call runs: implementation, target and tuned configurations.

The choice is made while tracing, when the device is often not known yet, so it names a backend
for CUDA and one for every other platform. JAX takes one of the two when it lowers the code for a
platform, which is right under `jit`, `jit(backend=...)` and ahead-of-time lowering alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax

from twin_attention.contract.explain import Explanation
from twin_attention.contract.spec import AttentionSpec, DecodeSpec
from twin_attention.contract.validate import check_choice, fail
from twin_attention.targets.config import Change, current_configs, repeat_configs, requested_configs
from twin_attention.targets.kernels import Spec
from twin_attention.targets.splits import choose_splits
from twin_attention.targets.target import MULTIPROCESSORS, requested_target, resolve_target

Implementation = Literal["mosaic", "triton", "reference"]
IMPLEMENTATIONS = get_args(Implementation)
Device = Any  # a jax.Device, which type checkers take for a variable
INTERPRET, REFERENCE = "interpret", "reference"


class Backends(NamedTuple):
    """What runs where: a target to compile the kernels for, `INTERPRET` or `REFERENCE`.

    Hashable, so that every cache of traced code is keyed by it. `changes` are those of
    `use_configs` around the call.
    """

    cuda: str
    elsewhere: str
    changes: tuple[Change, ...] = ()


def choose_backends(implementation: Implementation | None, device: Device | None) -> Backends:
    """The backends of a call.

    Args:
        implementation: what the caller asked for, or None for the best of each platform.
        device: where the operands are, None while that is not known. It decides the target;
            without it, this process's first CUDA device does, and without one of those the
            target asked for (`twin_attention.targets.target`), or "sm80".

    Raises:
        ValueError: no such implementation.
        NotImplementedError: "mosaic", or a CUDA device that the kernels cannot be compiled for.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    if implementation == "mosaic":
        fail(NotImplementedError, "implementation", "'triton' or 'reference'", "'mosaic'")
    if implementation == "reference":
        return Backends(REFERENCE, REFERENCE)
    elsewhere = REFERENCE if implementation is None else INTERPRET
    return Backends(_target(device), elsewhere, requested_configs())


def run_on_platform(backends: Backends, run: Callable[..., Any], *args: Any) -> Any:
    """``run(*args, backend=...)`` with the backend of the platform that this is lowered for.

    Call it under `jit`: outside, JAX goes by the default device and not by the operands'.
    """
    with repeat_configs(backends.changes):  # a backward may be traced after the block
        if backends.cuda == backends.elsewhere:
            return run(*args, backend=backends.cuda)
        return jax.lax.platform_dependent(
            *args,
            cuda=partial(run, backend=backends.cuda),
            default=partial(run, backend=backends.elsewhere),
        )


def configs_for(spec: Spec, target: str) -> Mapping[str, Any]:
    """Return the configuration of each kernel for a problem."""
    return current_configs("pallas_attn", target, spec)


def explain_choice(
    implementation: Implementation | None, device: Device | None, spec: AttentionSpec | DecodeSpec
) -> Explanation:
    """Describe what `choose_backends` leads to on `device`, or on the default one."""
    requested_target()  # refuses a wrong one, even where no code is compiled for it
    backends = choose_backends(implementation, device)
    on = jax.devices()[0] if device is None else device
    on_cuda = on in cuda_devices()
    backend = backends.cuda if on_cuda else backends.elsewhere
    compiled = backend not in (INTERPRET, REFERENCE)
    runs_kernels = backend != REFERENCE and not spec.is_empty
    target = backend if compiled else "sm80"
    configs = dict(configs_for(spec, target)) if runs_kernels else {}
    splits = None
    if runs_kernels and isinstance(spec, DecodeSpec):
        splits = choose_splits(spec, configs["paged_decode"], multiprocessors(backend))
        if splits > 1:
            configs |= configs_for(spec.merge(splits), target)
    if spec.is_empty:
        reason = "an empty problem runs no kernel"
    elif implementation is not None:
        reason = f"implementation={implementation!r} was asked for"
    elif on_cuda:
        reason = "the kernels are the best choice on a CUDA device"
    else:
        reason = "the kernels compile for CUDA devices only"
    if device is None:
        reason += ", and the default device stands for the operands' own, not known while tracing"
    return Explanation(
        implementation="reference" if backend == REFERENCE else "triton",
        execution=("compiled" if compiled else "interpreter") if runs_kernels else "framework",
        device=on.device_kind,
        target=backend if compiled and runs_kernels else None,
        reason=reason,
        configs=configs,
        num_splits=splits,
    )


def _target(device: Device | None) -> str:
    cuda = cuda_devices()
    if not cuda:
        return requested_target() or "sm80"
    gpu: Device = device if device in cuda else cuda[0]
    major, minor = gpu.compute_capability.split(".")
    return resolve_target((int(major), int(minor)))


def cuda_devices() -> Sequence[Device]:
    """This process's CUDA devices; none where JAX has no CUDA backend."""
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:  # this process has no CUDA backend
        return ()


def multiprocessors(backend: str) -> int:
    """How many multiprocessors the device has; without a device, the target's usual number."""
    devices = cuda_devices()
    if backend == INTERPRET or not devices:
        return MULTIPROCESSORS["sm80" if backend == INTERPRET else backend]
    return devices[0].core_count
