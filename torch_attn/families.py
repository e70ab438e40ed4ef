"""The kernel families of this side."""

from __future__ import annotations

from twin_attention.targets import family, sm80, sm90
from twin_attention.targets.family import Family
from twin_attention.targets.kernels import Spec

PACKAGE = "torch_attn"


def _gluon_sm80_covers(operation: str, spec: Spec, target: str | None) -> str | None:
    """Support what the kernels cover, if Triton's Gluon has their names."""
    return sm80.supports(operation, spec, target) or family.import_error(
        "torch_attn.kernels.sm80.flash_bwd"
    )


def _gluon_sm90_covers(operation: str, spec: Spec, target: str | None) -> str | None:
    return sm90.supports(operation, spec, target) or family.import_error(
        f"torch_attn.kernels.sm90.{operation}"
    )


def _triton_covers(operation: str, spec: Spec, target: str | None) -> str | None:
    reason = family.import_error(f"torch_attn.kernels.portable.{operation}")
    if reason is None and target is None:
        reason = family.import_error("torch_attn.interpreter")
    return reason


FAMILIES = (
    Family("gluon", PACKAGE, "sm80", covers=_gluon_sm80_covers, slower=sm80.slower),
    Family("gluon", PACKAGE, "sm90", covers=_gluon_sm90_covers, slower=sm90.slower,
           batch_invariant=True),
    Family("triton", PACKAGE, "portable", has_interpreter=True, batch_invariant=True,
           covers=_triton_covers),
    Family("reference", PACKAGE),
)  # fmt: skip
family.FAMILIES[PACKAGE], family.FOREIGN[PACKAGE] = FAMILIES, ()
