"""Kernel families: the languages in which each side has kernels, and which one runs a problem.

A side lists its families in order of speed, the reference last. ``implementation=None`` takes the
first one that supports the problem on the device, unless a later one is known to be faster. It
takes a family of the other side if that is known to be faster, or if none of its own kernels runs.
A name is a request: no family of another name replaces it. One language may have kernels for
several targets or operations, each a separate family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

from twin_attention.contract.paged_spec import DecodeSpec
from twin_attention.contract.spec import AttentionSpec, BlockSparseSpec, PartialSpec
from twin_attention.contract.validate.errors import fail
from twin_attention.targets import foreign, paged, sm80, sm90
from twin_attention.targets.collector import collector_paused
from twin_attention.targets.config import (
    config_of_smaller_cards,
    current_configs,
    smaller_configs,
)
from twin_attention.targets.kernels import KernelConfig, Spec


def _every_problem(operation: str, spec: Spec, target: str | None) -> str | None:
    """Support whatever the argument checks let through."""
    return None


def _never_slower(operation: str, spec: Spec, target: str | None) -> str | None:
    """Leave no supported problem to later families."""
    return None


def _never_faster(operation: str, spec: Spec, target: str | None) -> bool:
    """Leave every problem to the side's own families."""
    return False


@dataclass(frozen=True, eq=False)
class Family:
    """One language for kernels on one framework, or the framework's own operations.

    Attributes:
        name: the name by which a caller requests it, as `implementation`.
        package: the side that it belongs to, "torch_attn" or "pallas_attn".
        folder: where its kernels are, in the side's ``kernels``, and its tables, in ``configs``.
            None for the reference, which has no kernels: its functions are in
            ``kernels/reference.py``.
        has_interpreter: whether its kernels run on a CPU if requested by name.
        supports: returns None for an operation, a problem and a target that it has kernels for,
            else the reason why it has none. The operation is the name of a function, such as
            "flash_fwd"; the target is "sm80", "sm90", or None in the interpreter.
        slower: returns why implementation None leaves a supported problem to later families, such
            as a faster one; else None.
        is_foreign: whether this describes the family as the other side sees it, which launches its
            kernels too.
        faster: returns True for a problem on which it is faster than the families of the side that
            launches it; only for a foreign family.
    """

    name: str
    package: str
    folder: str | None = None
    has_interpreter: bool = False
    supports: Callable[[str, Spec, str | None], str | None] = _every_problem
    slower: Callable[[str, Spec, str | None], str | None] = _never_slower
    is_foreign: bool = False
    faster: Callable[[str, Spec, str | None], bool] = _never_faster

    def function(self, operation: str) -> Callable[..., Any]:
        """Return the function of an operation, such as "flash_fwd"; imports its module."""
        return _function(self, operation)


@cache
def _function(family: Family, operation: str) -> Callable[..., Any]:
    module = "reference" if family.folder is None else f"{family.folder}.{operation}"
    return getattr(import_module(f"{family.package}.kernels.{module}"), operation)


@cache
def _import_error(module: str) -> str | None:
    """Return why a module of kernels cannot be imported, None if it can."""
    try:
        with collector_paused():
            import_module(module)
    except (ImportError, AttributeError) as error:  # a version without the language, or its names
        return f"its kernels cannot be imported: {error}"
    return None


def _gluon_sm80_supports(operation: str, spec: Spec, target: str | None) -> str | None:
    """Support what the SM80 kernels cover, with a Triton whose Gluon has the names they use."""
    return sm80.supports(operation, spec, target) or _import_error(
        "torch_attn.kernels.sm80.flash_bwd"
    )


def _gluon_sm90_supports(operation: str, spec: Spec, target: str | None) -> str | None:
    """Support what the SM90 kernels cover, with a Triton whose Gluon has the names they use."""
    return sm90.supports(operation, spec, target) or _import_error(
        f"torch_attn.kernels.sm90.{operation}"
    )


def _triton_supports(operation: str, spec: Spec, target: str | None) -> str | None:
    """Support every problem, with a Triton that has the names that the kernels use."""
    reason = _import_error(f"torch_attn.kernels.portable.{operation}")
    if reason is None and target is None:
        reason = _import_error("torch_attn.interpreter")
    return reason


def _jax_runs(
    supports: Callable[[str, Spec, str | None], str | None],
) -> Callable[[str, Spec, str | None], str | None]:
    """Return what a family of `torch_attn` supports if JAX launches its kernels."""

    def supported(operation: str, spec: Spec, target: str | None) -> str | None:
        for package in ("triton", "torch"):
            if find_spec(package) is None:
                return (
                    f"{package} is not installed: its kernels are written in Triton, and PyTorch, "
                    "of which a build for CPUs will do, prepares their launches"
                )
        import_module("pallas_attn.private").hash_triton()
        return (
            supports(operation, spec, target)
            or _missing_names("foreign")
            or _import_error("torch_attn.outline")
            or _import_error("torch_attn.ahead")
            or sm90.jax_leaves(operation, spec, target)
        )

    return supported


def _torch_runs(
    supports: Callable[[str, Spec, str | None], str | None],
) -> Callable[[str, Spec, str | None], str | None]:
    """Return what a family of `pallas_attn` supports if PyTorch launches its kernels."""

    def supported(operation: str, spec: Spec, target: str | None) -> str | None:
        attends = isinstance(spec, AttentionSpec | DecodeSpec)
        if not attends or isinstance(spec, BlockSparseSpec | PartialSpec):
            return "PyTorch launches its kernels of dense, packed and paged attention alone"
        if isinstance(spec, AttentionSpec) and not spec.placement.compact:
            return (
                "its kernels read contiguous tensors that begin at multiples of 256 bytes, as "
                "arrays of JAX do"
            )
        if find_spec("jax") is None:
            return "jax is not installed, which compiles its kernels (pip install 'jax[cuda13]')"
        return (
            _older_jax((0, 11, 2))
            or supports(operation, spec, target)
            or _import_error("pallas_attn.outline")
            or _no_plugin()
        )

    return supported


def _no_plugin() -> str | None:
    """Return what JAX lacks to compile kernels, None for nothing."""
    if import_module("pallas_attn.ahead").plugin() is None:
        return "JAX's CUDA plugin, which compiles its kernels, is not installed"
    return None


def _missing_names(group: str) -> str | None:
    """Return which private names of JAX or Triton the kernels of `pallas_attn` lack."""
    return import_module("pallas_attn.private").missing(group)


def _pallas_triton_supports(operation: str, spec: Spec, target: str | None) -> str | None:
    """Support every problem, with a JAX and a Triton that have the names that kernels use.

    The interpreter needs no names of the compiler.
    """
    reason = _import_error(f"pallas_attn.kernels.portable.{operation}")
    if reason is None and target is not None:
        reason = _missing_names("triton")
    return reason


def _mosaic_sm80_supports(operation: str, spec: Spec, target: str | None) -> str | None:
    """Support what the SM80 kernels cover, with a JAX whose Mosaic GPU has the names they use.

    `pallas_attn` asks on every machine, since it traces for CUDA on each. An older JAX is detected
    by its version; with a newer one, tracing needs this import anyway.
    """
    return (
        sm80.supports(operation, spec, target)
        or sm80.mosaic_leaves(spec)
        or _older_jax()
        or _missing_names("mosaic")
        or _import_error("pallas_attn.kernels.sm80.flash_fwd")
        or _import_error("pallas_attn.kernels.sm80.flash_bwd")
    )


def _mosaic_sm90_supports(operation: str, spec: Spec, target: str | None) -> str | None:
    """Support what the SM90 kernels cover; see `_mosaic_sm80_supports`.

    A JAX array has no strides: its rows lie one after the other, at multiples of 16 bytes.
    """
    return (
        sm90.supports(operation, spec, target)
        or sm90.mosaic_leaves(operation, spec)
        or _older_jax()
        or _missing_names("mosaic")
        or _import_error(f"pallas_attn.kernels.sm90.{operation}")
    )


def _mosaic_paged_supports(operation: str, spec: Spec, target: str | None) -> str | None:
    """Support what the kernels of paged caches cover, as `_mosaic_sm80_supports` does."""
    return (
        paged.supports(spec)
        or _older_jax()
        or _missing_names("mosaic")
        or _import_error("pallas_attn.kernels.paged.paged_decode")
        or _import_error("pallas_attn.kernels.paged.append_kv")
    )


@cache
def _older_jax(needed: tuple[int, ...] = (0, 11)) -> str | None:
    """Return what JAX's version lacks for Mosaic GPU kernels, None for nothing."""
    found = version("jax")
    if tuple(map(int, re.findall(r"\d+", found)[: len(needed)])) < needed:
        return f"its kernels need jax {'.'.join(map(str, needed))} or newer, not {found}"
    return None


FAMILIES = {
    "torch_attn": (
        Family("gluon", "torch_attn", "sm80", supports=_gluon_sm80_supports, slower=sm80.slower),
        Family("gluon", "torch_attn", "sm90", supports=_gluon_sm90_supports, slower=sm90.slower),
        Family(
            "triton",
            "torch_attn",
            "portable",
            has_interpreter=True,
            supports=_triton_supports,
        ),
        Family("reference", "torch_attn"),
    ),
    "pallas_attn": (
        Family("mosaic", "pallas_attn", "sm80", supports=_mosaic_sm80_supports),
        Family("mosaic", "pallas_attn", "sm90", supports=_mosaic_sm90_supports),
        Family(
            "mosaic",
            "pallas_attn",
            "paged",
            supports=_mosaic_paged_supports,
            slower=paged.slower,
        ),
        Family(
            "triton",
            "pallas_attn",
            "portable",
            has_interpreter=True,
            supports=_pallas_triton_supports,
        ),
        Family("reference", "pallas_attn"),
    ),
}

# Families of the other side that a side also launches.
FOREIGN = {
    "torch_attn": tuple(
        Family("mosaic", "pallas_attn", folder, supports=_torch_runs(supports), is_foreign=True)
        for folder, supports in (
            ("sm80", _mosaic_sm80_supports), ("sm90", _mosaic_sm90_supports),
            ("paged", _mosaic_paged_supports),
        )
    ),
    "pallas_attn": tuple(
        Family(
            name, "torch_attn", folder, supports=_jax_runs(supports), faster=faster, is_foreign=True
        )
        for name, folder, supports, faster in (
            ("gluon", "sm80", _gluon_sm80_supports, _never_faster),
            ("gluon", "sm90", _gluon_sm90_supports, foreign.gluon_is_faster),
            ("torch_triton", "portable", _triton_supports, _never_faster),
        )
    ),
}  # fmt: skip


def families_of(package: str) -> tuple[Family, ...]:
    """Return the families of a side, its own and then those of the other side."""
    return (*FAMILIES[package], *FOREIGN[package])


def _in_order_of_speed(
    package: str, operation: str, spec: Spec, target: str | None
) -> tuple[Family, ...]:
    """Return the families that ``implementation=None`` tries for a problem on a CUDA device."""
    *own, reference = FAMILIES[package]
    first = [x for x in FOREIGN[package] if x.faster(operation, spec, target)]
    return (*first, *own, *(x for x in FOREIGN[package] if x not in first), reference)


class Backend(NamedTuple):
    """The family that runs a call, and how.

    Attributes:
        family: whose function runs.
        target: what its kernels are compiled for, "sm80" or "sm90"; None if nothing is compiled.
        interpreted: its kernels run in their framework's interpreter.
    """

    family: Family
    target: str | None = None
    interpreted: bool = False

    @property
    def runs_kernels(self) -> bool:
        """True for kernels, compiled or interpreted; False for the reference."""
        return self.family.folder is not None

    def configs(self, spec: Spec) -> Mapping[str, Any]:
        """Return the configuration of each kernel for a problem; the interpreter has SM80's."""
        folder = self.family.folder
        if folder is None:
            return {}
        return current_configs(self.family.package, self.target or "sm80", spec, folder)

    def smaller_configs(
        self, spec: Spec, kernel: str, config: KernelConfig
    ) -> tuple[KernelConfig, ...]:
        """Return what to compile a kernel with if its configuration does not fit the card."""
        assert self.family.folder is not None
        assert self.target is not None
        return smaller_configs(
            self.family.package, self.target, spec, self.family.folder, kernel, config
        )

    def config_of_smaller_cards(
        self, spec: Spec, kernel: str, config: KernelConfig
    ) -> KernelConfig:
        """Return what to trace a kernel with for a card with less than the target's memory."""
        assert self.family.folder is not None
        assert self.target is not None
        return config_of_smaller_cards(
            self.family.package, self.target, spec, self.family.folder, kernel, config
        )


def portable_backend(package: str, target: str | None) -> Backend:
    """Return the backend of a side's portable kernels; without a target, interpreted."""
    (family,) = (family for family in FAMILIES[package] if family.folder == "portable")
    return Backend(family, target, interpreted=target is None)


def choose(
    package: str,
    implementation: str | None,
    operation: str,
    spec: Spec,
    target: str | None,
    interpretable: bool,
    foreign: bool = True,
) -> tuple[Backend, tuple[str, ...]]:
    """Choose the family that runs a problem.

    Args:
        package: the side, "torch_attn" or "pallas_attn".
        implementation: the name of the requested family, or None for the best.
        operation: the function to run, such as "flash_fwd".
        spec: the problem.
        target: whose code the device runs, "sm80" or "sm90"; None for a device without kernels.
        interpretable: whether an interpreter can take the device's tensors.
        foreign: whether None may take a family of the other side, whose framework is then imported.

    Returns:
        The backend, and a line for each family that was passed over, with the reason.

    Raises:
        NotImplementedError: the requested family does not support the problem.
    """
    passed_over = []
    if implementation is not None:
        families = tuple(x for x in families_of(package) if x.name == implementation)
    elif target is None or not foreign:
        families = FAMILIES[package]
    else:
        families = _in_order_of_speed(package, operation, spec, target)
    for family in families:
        if family.folder is None:
            return Backend(family), tuple(passed_over)
        interpreted = target is None and implementation is not None and interpretable
        if interpreted and not family.has_interpreter:
            reason = "its kernels compile for CUDA devices only, and it has no interpreter"
        elif target is None and not interpreted:
            reason = "its kernels compile for CUDA devices only"
        else:
            reason = family.supports(operation, spec, target)
            if reason is None and implementation is None:
                reason = family.slower(operation, spec, target)
        if reason is None:
            return Backend(family, target, interpreted), tuple(passed_over)
        line = f"{family.name}: {reason}"
        if line not in passed_over:  # families of the same name may have the same reason
            passed_over.append(line)
    expected = "None, or the name of one that supports the problem on this device"
    reasons = "; ".join(line.partition(": ")[2] for line in passed_over)
    return fail(NotImplementedError, "implementation", expected, f"{implementation!r}: {reasons}")
