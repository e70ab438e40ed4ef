"""Which code a call runs: the implementation, and what `explain` says of it."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from twin_attention.contract.explain import Explanation
from twin_attention.contract.spec import AttentionSpec, DecodeSpec
from twin_attention.contract.validate import check_choice, fail
from twin_attention.targets.splits import choose_splits
from twin_attention.targets.target import requested_target

Implementation = Literal["triton", "reference"]
IMPLEMENTATIONS = get_args(Implementation)
KERNEL_DEVICES = ("cuda", "cpu", "meta")  # compiled, interpreted, and only described


def choose(implementation: Implementation | None, device: torch.device) -> Implementation:
    """The implementation asked for, or with None the best for the device.

    Raises:
        ValueError: no such implementation.
        NotImplementedError: kernels asked for on a device for which there are none.
    """
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    if implementation == "triton" and device.type not in KERNEL_DEVICES:
        expected = f"None or 'reference' on a device of type {device.type}"
        fail(NotImplementedError, "implementation", expected, "'triton'")
    return implementation or ("triton" if device.type == "cuda" else "reference")


def explain_choice(
    implementation: Implementation | None, device: torch.device, spec: AttentionSpec | DecodeSpec
) -> Explanation:
    """Describe what `choose` leads to for a problem."""
    requested_target()  # refuses a wrong one, even where no code is compiled for it
    from torch_attn.launch import configs_for, multiprocessors, target_of

    chosen = choose(implementation, device)
    on_cuda = device.type == "cuda"
    runs_kernels = chosen == "triton" and not spec.is_empty
    target = target_of(device) if runs_kernels and on_cuda else None
    configs = dict(configs_for(spec, target or "sm80")) if runs_kernels else {}
    splits = None
    if runs_kernels and isinstance(spec, DecodeSpec):
        multiprocessor_count = multiprocessors(device, target or "sm80")
        splits = choose_splits(spec, configs["paged_decode"], multiprocessor_count)
        if splits > 1:
            configs |= configs_for(spec.merge(splits), target or "sm80")
    if spec.is_empty:
        reason = "an empty problem runs no kernel"
    elif implementation is not None:
        reason = f"implementation={implementation!r} was asked for"
    elif on_cuda:
        reason = "the kernels are the best choice on a CUDA device"
    else:
        reason = "the kernels compile for CUDA devices only"
    return Explanation(
        implementation=chosen,
        execution=("compiled" if on_cuda else "interpreter") if runs_kernels else "framework",
        device=torch.cuda.get_device_name(device) if on_cuda else device.type,
        target=target,
        reason=reason,
        configs=configs,
        num_splits=splits,
    )
