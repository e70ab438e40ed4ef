"""Say which kernels of `pallas_attn` PyTorch launches."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.contract.spec import AttentionSpec, BlockSparseSpec, PartialSpec
from twin_attention.targets import family, versions
from twin_attention.targets.family import Backend
from twin_attention.targets.kernels import Spec


def supports(folder: str, operation: str, spec: Spec, target: str | None) -> str | None:
    """Return None for a problem that a family of `pallas_attn` runs in PyTorch, else why not."""
    attends = isinstance(spec, AttentionSpec | DecodeSpec)
    if not attends or isinstance(spec, BlockSparseSpec | PartialSpec):
        return "PyTorch launches only its kernels of dense, packed and paged attention"
    if isinstance(spec, AttentionSpec) and not spec.placement.compact:
        return (
            "its kernels read contiguous tensors that begin at multiples of 256 bytes, as "
            "arrays of JAX do"
        )
    if find_spec("jax") is None:
        return "jax is not installed, which compiles its kernels (pip install 'jax[cuda13]')"
    return (
        versions.older_jax((0, 11, 2))
        or family.import_error("pallas_attn.families")
        or family.own_family("pallas_attn", folder).supports(operation, spec, target)
        or family.import_error("twin_attention.interop.kernels.jax_host")
        or _no_plugin()
    )


def run(backend: Backend, operation: str, spec: Spec, *operands: Any) -> Any:
    from twin_attention.interop.kernels import run_in_torch

    own = family.own_family("pallas_attn", backend.family.folder)
    return run_in_torch.run(backend._replace(family=own), operation, spec, *operands)


def _no_plugin() -> str | None:
    from twin_attention.interop.kernels.mosaic import plugin

    return None if plugin() else "JAX's CUDA plugin, which compiles its kernels, is not installed"
