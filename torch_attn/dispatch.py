from __future__ import annotations

import logging
from typing import Literal, get_args

import torch

from torch_attn import families
from torch_attn.targets import num_sms, target_of
from twin_attention.contract.explain import Explanation
from twin_attention.contract.validate.options import check_choice
from twin_attention.targets import family
from twin_attention.targets.describe import describe, function_of, log_once
from twin_attention.targets.family import Backend
from twin_attention.targets.kernels import Spec

Implementation = Literal["gluon", "triton", "reference"]
IMPLEMENTATIONS = get_args(Implementation)
LOGGER = logging.getLogger(families.PACKAGE)


def check_implementation(implementation: Implementation | None) -> None:
    check_choice("implementation", implementation, IMPLEMENTATIONS)


def choose(
    implementation: Implementation | None, operation: str, device: torch.device, spec: Spec
) -> tuple[Backend, tuple[str, ...]]:
    """Choose what runs a problem; see `twin_attention.targets.family.choose`."""
    target = None if implementation == "reference" else target_of(device)
    interpretable = device.type in ("cpu", "meta")
    return family.choose(families.PACKAGE, implementation, operation, spec, target, interpretable)


def describe_choice(
    implementation: Implementation | None, operation: str, device: torch.device, spec: Spec
) -> Explanation:
    backend, passed_over = choose(implementation, function_of(operation, spec), device, spec)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    count = num_sms(device, backend.target)
    return describe(implementation, operation, backend, passed_over, spec, name, count)


def log_choice(
    implementation: Implementation | None, operation: str, device: torch.device, spec: Spec
) -> None:
    if LOGGER.isEnabledFor(logging.DEBUG):
        log_once(LOGGER, operation, spec, describe_choice(implementation, operation, device, spec))
