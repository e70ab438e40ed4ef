"""The kernel families of this side, and those of `torch_attn` that it launches."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from pallas_attn import private
from twin_attention.targets import family, foreign, paged, sm80, sm90, versions
from twin_attention.targets.family import Family
from twin_attention.targets.kernels import Spec

PACKAGE = "pallas_attn"
_IN_JAX = "twin_attention.interop.kernels.in_jax"


def _triton_covers(operation: str, spec: Spec, target: str | None) -> str | None:
    """Support every problem, if JAX and Triton have the kernels' names."""
    reason = family.import_error(f"pallas_attn.kernels.portable.{operation}")
    if reason is None and target is not None:
        reason = private.missing("triton")
    return reason


def _mosaic_sm80_covers(operation: str, spec: Spec, target: str | None) -> str | None:
    """Support what the kernels cover, if JAX's Mosaic GPU has their names.

    Every machine asks, so an older JAX is detected by its version, without an import.
    """
    return (
        sm80.supports(operation, spec, target)
        or sm80.mosaic_leaves(spec)
        or versions.older_jax()
        or private.missing("mosaic")
        or family.import_error("pallas_attn.kernels.sm80.flash_fwd")
        or family.import_error("pallas_attn.kernels.sm80.flash_bwd")
    )


def _mosaic_sm90_covers(operation: str, spec: Spec, target: str | None) -> str | None:
    """Support what the SM90 kernels cover; a JAX array's rows lie at multiples of 16 bytes."""
    return (
        sm90.supports(operation, spec, target)
        or sm90.mosaic_leaves(operation, spec)
        or versions.older_jax()
        or private.missing("mosaic")
        or family.import_error(f"pallas_attn.kernels.sm90.{operation}")
    )


def _mosaic_paged_covers(operation: str, spec: Spec, target: str | None) -> str | None:
    return (
        paged.supports(spec)
        or versions.older_jax()
        or private.missing("mosaic")
        or family.import_error("pallas_attn.kernels.paged.paged_decode")
        or family.import_error("pallas_attn.kernels.paged.append_kv")
    )


def _of_torch(name: str, folder: str, **more: Any) -> Family:
    """Describe a family of `torch_attn` that JAX launches; `more` are other attributes."""

    def covers(operation: str, spec: Spec, target: str | None) -> str | None:
        missing = family.import_error(_IN_JAX)
        return missing or import_module(_IN_JAX).supports(folder, operation, spec, target)

    def function(operation: str) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            *operands, spec, backend = arguments
            return import_module(_IN_JAX).run(backend, operation, spec, *operands)

        return run

    return Family(name, "torch_attn", folder, covers=covers, abroad=function, **more)


FAMILIES = (
    Family("mosaic", PACKAGE, "sm80", covers=_mosaic_sm80_covers),
    Family("mosaic", PACKAGE, "sm90", covers=_mosaic_sm90_covers),
    Family("mosaic", PACKAGE, "paged", covers=_mosaic_paged_covers, slower=paged.slower),
    Family("triton", PACKAGE, "portable", has_interpreter=True, covers=_triton_covers),
    Family("reference", PACKAGE),
)
FOREIGN = (
    _of_torch("gluon", "sm80"),
    _of_torch("gluon", "sm90", faster=foreign.gluon_is_faster, batch_invariant=True),
    _of_torch("torch_triton", "portable", has_interpreter=True, batch_invariant=True),
)
family.FAMILIES[PACKAGE], family.FOREIGN[PACKAGE] = FAMILIES, FOREIGN
