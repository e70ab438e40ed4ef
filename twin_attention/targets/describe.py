"""Describe what a call would run: the content of `explain`, the same on both sides."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import fields, replace
from functools import lru_cache

from twin_attention.contract.explain import Explanation
from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.contract.spec import AttentionSpec
from twin_attention.targets.family import FOREIGN, Backend, families_of
from twin_attention.targets.kernels import FAMILY_KERNELS, DecodeConfig, Spec
from twin_attention.targets.splits import choose_splits, decode_kernel

_OPERATIONS = {
    "flash_attention": "flash_fwd",
    "flash_attention_varlen": "flash_fwd",
    "block_sparse_attention": "flash_fwd",
    "dilated_attention": "flash_fwd",
    "context_attention": "flash_fwd",
    "paged_decode": "paged_decode",
    "paged_attention": "paged_attention",
    "append_kv": "append_kv",
    "merge_states": "combine",
}


def describe_call(function: str, describe_operation: Callable[[str], Explanation]) -> Explanation:
    """Describe a call, and its backward if it has one."""
    operation = _OPERATIONS[function]
    said = describe_operation(operation)
    if operation == "combine" and said.execution != "framework":
        return replace(said, backward="the framework's own operations")
    if operation != "flash_fwd":
        return said
    try:
        backward = describe_operation("flash_bwd")
    except NotImplementedError as error:
        return replace(said, backward=str(error))
    if backward.implementation != said.implementation:
        return replace(said, backward=str(backward))
    return replace(said, configs={**said.configs, **backward.configs})


def function_of(operation: str, spec: Spec) -> str:
    return operation.replace("flash", "partial") if spec.is_part else operation


def log_once(logger: logging.Logger, operation: str, spec: Spec, said: Explanation) -> None:
    """Log what runs an operation, and the parts of its problem that are no defaults, once."""
    values = ((x.name, getattr(spec, x.name), x.default) for x in fields(spec))
    problem = (f"{name}={value}" for name, value, default in values if value != default)
    _log(logger, f"{operation}({', '.join(problem)}): {said}")


@lru_cache(maxsize=1024)
def _log(logger: logging.Logger, message: str) -> None:
    logger.debug("%s", message)


def describe(
    implementation: str | None,
    operation: str,
    backend: Backend,
    passed_over: tuple[str, ...],
    spec: Spec,
    device: str,
    num_sms: int,
) -> Explanation:
    """Describe the choice (backend, passed_over) of `twin_attention.targets.family.choose`."""
    if spec.is_empty:
        reason, backend = "an empty problem runs no kernel", backend._replace(target=None)
    elif implementation is not None:
        reason = f"implementation={implementation!r} was asked for"
    elif backend.family.faster(operation, spec, backend.target):
        reason = "measured to be at least as fast as this side's own kernels"
    elif passed_over:
        reason = "the first that supports the problem on this device"
    else:
        reason = "the best choice on a CUDA device"
    others: tuple[str, ...] = ()
    if implementation is None and operation == "flash_fwd":
        (package,) = (x for x in FOREIGN if backend.family in families_of(x))
        names = dict.fromkeys(family.name for family in FOREIGN[package])
        others = tuple(name for name in names if name != backend.family.name)
    runs_kernels = backend.runs_kernels and not spec.is_empty
    configs = dict(backend.configs(spec)) if runs_kernels else {}
    if isinstance(spec, AttentionSpec):
        kernels = FAMILY_KERNELS[backend.family.folder or "portable"]
        function = operation.replace("partial", "flash")
        configs = {name: x for name, x in configs.items() if kernels[name].function == function}
    splits = None
    if runs_kernels and isinstance(spec, DecodeSpec):
        kernel = decode_kernel(spec)
        if kernel not in configs:  # latent caches with SM90's explicit kernel
            kernel = "paged_decode"
        configs = {kernel: configs[kernel]}
        is_split = isinstance(configs[kernel], DecodeConfig)
        splits = choose_splits(spec, configs[kernel], num_sms) if is_split else 1
        if splits > 1:
            configs |= backend.configs(spec.merge(splits))
    if not runs_kernels:
        execution = "framework"
    else:
        execution = "interpreter" if backend.interpreted else "compiled"
    return Explanation(
        implementation=backend.family.name,
        execution=execution,
        device=device,
        target=backend.target,
        reason=reason,
        passed_over=passed_over,
        configs=configs,
        num_splits=splits,
        by_name=others,
        foreign=backend.family.package if backend.family.is_foreign else None,
    )
