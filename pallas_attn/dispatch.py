"""Choose the kernel family for a problem, for each platform.

While a call is traced, its device is often unknown. So there is one backend for CUDA and one for
every other platform, and JAX takes one of them when it lowers the code.
"""

from __future__ import annotations

import logging
from typing import Any, Literal, NamedTuple, get_args

import jax

from pallas_attn import families, private
from pallas_attn.shards import run_on_shards
from pallas_attn.targets import Device, cuda_devices, num_sms, target_of
from twin_attention.contract.explain import Explanation
from twin_attention.contract.spec import AttentionSpec
from twin_attention.contract.validate.options import check_choice
from twin_attention.targets import family, invariant
from twin_attention.targets.config import Change, repeat_configs, requested_configs
from twin_attention.targets.describe import describe, function_of, log_once
from twin_attention.targets.family import Backend
from twin_attention.targets.kernels import Spec
from twin_attention.targets.target import requested_target

Implementation = Literal["mosaic", "triton", "reference", "gluon", "torch_triton"]
IMPLEMENTATIONS = get_args(Implementation)
LOGGER = logging.getLogger(families.PACKAGE)


class Backends(NamedTuple):
    """The backend of each platform, and changes of `use_configs`; a key of traced code's caches.

    For a requested family without an interpreter `elsewhere` is `cuda`, and JAX then refuses to
    lower it there; so where None finds kernels for `batch_invariant`.
    """

    cuda: Backend
    elsewhere: Backend
    changes: tuple[Change, ...] = ()

    def of_derivative(
        self, implementation: Implementation | None, operation: str, spec: AttentionSpec
    ) -> Backends:
        """Return the backends of this forward's "flash_bwd" or "flash_jvp"."""

        def again(backend: Backend) -> Backend:
            if not backend.runs_kernels:
                return backend
            return choose(implementation, operation, backend.target, spec)[0]

        backends = self._replace(cuda=again(self.cuda), elsewhere=again(self.elsewhere))
        log_choice(implementation, operation, None, spec)
        return backends


def check_implementation(implementation: Implementation | None) -> None:
    check_choice("implementation", implementation, IMPLEMENTATIONS)


def choose(
    implementation: Implementation | None,
    operation: str,
    target: str | None,
    spec: Spec,
    only_own: bool = False,
) -> tuple[Backend, tuple[str, ...]]:
    """Choose what runs a problem; see `twin_attention.targets.family.choose`.

    Args:
        target: of CUDA devices, or None for another platform.
        only_own: with implementation None, take no family of `torch_attn`.

    Raises:
        NotImplementedError: the requested family does not support the problem there.
    """
    # A process without a GPU traces for one each time, and seldom lowers the result.
    has_gpu = bool(cuda_devices()) or requested_target() is not None
    may_import = has_gpu and not only_own
    return family.choose(
        families.PACKAGE, implementation, operation, spec, target, True, may_import
    )


def choose_backends(
    implementation: Implementation | None,
    operation: str,
    device: Device | None,
    spec: Spec,
    only_own: bool = False,
) -> Backends:
    """Choose what runs a problem on each platform; `device` is None if not known yet."""
    check_implementation(implementation)
    target = None if implementation == "reference" else target_of(device)
    on_cuda = bool(cuda_devices()) if device is None else device in cuda_devices()
    if implementation == "triton" and not on_cuda and private.missing("triton"):
        target = None  # nothing can be compiled: every platform has the interpreter
    if device is not None and device not in cuda_devices():
        # First, so that a refusal says what is wrong on this device.
        elsewhere, _ = choose(implementation, operation, None, spec)
        cuda, _ = choose(implementation, operation, target, spec, only_own)
    else:
        cuda, _ = choose(implementation, operation, target, spec, only_own)
        compiles_only = not cuda.family.has_interpreter
        if implementation is None:  # which never interprets; the reference lacks the option
            compiles_only = invariant.is_asked_of(spec)
        if cuda.runs_kernels and compiles_only:
            elsewhere = cuda
        else:
            elsewhere, _ = choose(implementation, operation, None, spec)
    log_choice(implementation, operation, device, spec)
    return Backends(cuda, elsewhere, requested_configs())


def describe_choice(
    implementation: Implementation | None, operation: str, device: Device | None, spec: Spec
) -> Explanation:
    """Describe what runs an operation of a public function on a device, None for the default."""
    on = jax.devices()[0] if device is None else device
    runs_kernels = on in cuda_devices() and implementation != "reference"
    target = target_of(device) if runs_kernels else None
    name = on.device_kind
    if device is None:
        name += ", the default device: the operands' own is not known while tracing"
    backend, passed_over = choose(implementation, function_of(operation, spec), target, spec)
    count = num_sms(backend.target)
    return describe(implementation, operation, backend, passed_over, spec, name, count)


def log_choice(
    implementation: Implementation | None, operation: str, device: Device | None, spec: Spec
) -> None:
    if LOGGER.isEnabledFor(logging.DEBUG):
        log_once(LOGGER, operation, spec, describe_choice(implementation, operation, device, spec))


def run_on_platform(backends: Backends, operation: str, spec: Spec, *operands: Any) -> Any:
    """Run an operation's function with the backend of the platform that this is lowered for.

    Call it under `jit`: outside, JAX uses the default device instead of the operands'.
    """

    def run(spec: Spec, *operands: Any) -> Any:
        def on(backend: Backend) -> Any:
            function = backend.family.function(operation)
            return lambda *operands: function(*operands, spec, backend)

        with repeat_configs(backends.changes):  # a backward may be traced after the block
            if backends.cuda == backends.elsewhere:
                return on(backends.cuda)(*operands)
            return jax.lax.platform_dependent(
                *operands, cuda=on(backends.cuda), default=on(backends.elsewhere)
            )

    code = [(x.family.name, x.family.folder, x.target) for x in backends[:2]], backends.changes
    return run_on_shards(run, operation, code, spec, *operands)
