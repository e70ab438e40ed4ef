"""Say which kernels of `torch_attn` JAX launches."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from pallas_attn import private
from twin_attention.interop.kernels import known
from twin_attention.targets import sm80, sm90
from twin_attention.targets.family import Backend
from twin_attention.targets.kernels import Spec

# What is asked before PyTorch is imported.
_RULES = {"sm80": sm80.supports, "sm90": sm90.supports, "portable": lambda *_: None}


def supports(folder: str, operation: str, spec: Spec, target: str | None) -> str | None:
    """Return None for a problem that a family of `torch_attn` runs in JAX, else why not."""
    for package in ("triton", "torch"):
        if find_spec(package) is None:
            return (
                f"{package} is not installed: its kernels are written in Triton, and PyTorch, "
                "of which a build for CPUs will do, prepares their launches"
            )
    if target is None:
        return known.refusal(folder, operation, spec, target)
    return (
        _RULES[folder](operation, spec, target)
        or private.missing("foreign")
        or sm90.jax_leaves(operation, spec, target)
        or known.refusal(folder, operation, spec, target)
    )


def run(backend: Backend, operation: str, spec: Spec, *operands: Any) -> Any:
    from twin_attention.interop.kernels import run_in_jax

    return run_in_jax.run(backend, operation, spec, *operands)
