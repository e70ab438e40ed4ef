"""The kernel families of this side, and those of `pallas_attn` that it launches."""

from __future__ import annotations

from twin_attention.targets import family, invariant, sm80, sm90
from twin_attention.targets.family import Family, foreign_family
from twin_attention.targets.kernels import Spec

PACKAGE = "torch_attn"
_IN_TORCH = "twin_attention.interop.kernels.in_torch"


def _gluon_sm80_supports(operation: str, spec: Spec, target: str | None) -> str | None:
    """Support what the kernels cover, if Triton's Gluon has their names."""
    return sm80.supports(operation, spec, target) or family.import_error(
        "torch_attn.kernels.sm80.flash_bwd"
    )


def _gluon_sm90_supports(operation: str, spec: Spec, target: str | None) -> str | None:
    return sm90.supports(operation, spec, target) or family.import_error(
        f"torch_attn.kernels.sm90.{operation}"
    )


def _triton_supports(operation: str, spec: Spec, target: str | None) -> str | None:
    reason = invariant.lacks(operation, spec)
    reason = reason or family.import_error(f"torch_attn.kernels.portable.{operation}")
    if reason is None and target is None:
        reason = family.import_error("torch_attn.interpreter")
    return reason


FAMILIES = (
    Family("gluon", PACKAGE, "sm80", supports=_gluon_sm80_supports, slower=sm80.slower),
    Family("gluon", PACKAGE, "sm90", supports=_gluon_sm90_supports, slower=sm90.slower),
    Family("triton", PACKAGE, "portable", has_interpreter=True, supports=_triton_supports),
    Family("reference", PACKAGE, supports=invariant.rounds_by_shape),
)
FOREIGN = tuple(
    foreign_family("mosaic", "pallas_attn", folder, _IN_TORCH)
    for folder in ("sm80", "sm90", "paged")
)
family.FAMILIES[PACKAGE], family.FOREIGN[PACKAGE] = FAMILIES, FOREIGN
