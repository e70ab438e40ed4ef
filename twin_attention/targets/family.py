"""Kernel families: the languages in which each side has kernels, and which one runs a problem.

A side lists its families in order of speed, the reference last. ``implementation=None`` takes the
first one that supports the problem on the device, unless a later one, or one of the other side, is
known to be faster. A name is a request: no family of another name replaces it. One language may
have several families, for other targets or operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

from twin_attention.contract.validate.errors import fail
from twin_attention.targets import invariant
from twin_attention.targets.collector import collector_paused
from twin_attention.targets.config import config_of_smaller_cards, current_configs, smaller_configs
from twin_attention.targets.kernels import KernelConfig, Spec


def _no_reason(operation: str, spec: Spec, target: str | None) -> str | None:
    return None


def _never_faster(operation: str, spec: Spec, target: str | None) -> bool:
    """Leave every problem to the side's own families."""
    return False


@dataclass(frozen=True, eq=False)
class Family:
    """One language for kernels on one framework, or the framework's own operations.

    Attributes:
        name: the `implementation` of a call.
        package: the side, "torch_attn" or "pallas_attn".
        folder: of its kernels in the side's ``kernels``, and of its tables in ``configs``. None for
            the reference, whose functions are in ``kernels/reference.py``.
        has_interpreter: its kernels run on a CPU if requested by name.
        covers: returns why it has no kernels for an operation, a problem and a target, else None.
            The target is None in the interpreter.
        batch_invariant: its forwards keep the order of sums of `batch_invariant`.
        slower: returns why implementation None leaves a supported problem to later families; else
            None.
        faster: returns True for a problem on which a foreign family is faster than the families of
            the side that launches it.
        abroad: returns what runs an operation on the other side; None for the side's own family.
    """

    name: str
    package: str
    folder: str | None = None
    has_interpreter: bool = False
    covers: Callable[[str, Spec, str | None], str | None] = _no_reason
    batch_invariant: bool = False
    slower: Callable[[str, Spec, str | None], str | None] = _no_reason
    faster: Callable[[str, Spec, str | None], bool] = _never_faster
    abroad: Callable[[str], Callable[..., Any]] | None = None

    @property
    def is_foreign(self) -> bool:
        """True for a family as the other side sees it, which launches its kernels too."""
        return self.abroad is not None

    def supports(self, operation: str, spec: Spec, target: str | None) -> str | None:
        """Return why the family leaves a problem out, or None."""
        missing = None
        if operation not in invariant.DERIVATIVES and invariant.is_asked_of(spec):
            missing = invariant.lacks(spec)
            if not self.batch_invariant:
                missing = (
                    "with batch_invariant only Triton kernels of torch_attn or Gluon's for SM90 run"
                )
        return missing or self.covers(operation, spec, target)

    def function(self, operation: str) -> Callable[..., Any]:
        """Return the function of an operation; imports its module."""
        return (self.abroad or partial(_function, self))(operation)


@cache
def _function(family: Family, operation: str) -> Callable[..., Any]:
    module = "reference" if family.folder is None else f"{family.folder}.{operation}"
    return getattr(import_module(f"{family.package}.kernels.{module}"), operation)


@cache
def import_error(module: str) -> str | None:
    """Return why a module of kernels cannot be imported, None if it can."""
    try:
        with collector_paused():
            import_module(module)
    except (ImportError, AttributeError) as error:  # a version without the language, or its names
        return f"its kernels cannot be imported: {error}"
    return None


# The families of each side, and those of the other side that it also launches. A side's
# `families.py` adds them when the side is imported.
FAMILIES: dict[str, tuple[Family, ...]] = {}
FOREIGN: dict[str, tuple[Family, ...]] = {}


def own_family(package: str, folder: str | None) -> Family:
    """Return the family of a side whose kernels are in this folder."""
    return next(x for x in FAMILIES[package] if x.folder == folder)


def families_of(package: str) -> tuple[Family, ...]:
    return (*FAMILIES[package], *FOREIGN[package])


def _in_order_of_speed(
    package: str, operation: str, spec: Spec, target: str | None
) -> tuple[Family, ...]:
    """Return the families that ``implementation=None`` tries on a CUDA device."""
    *own, reference = FAMILIES[package]
    first = [x for x in FOREIGN[package] if x.faster(operation, spec, target)]
    return (*first, *own, *(x for x in FOREIGN[package] if x not in first), reference)


class Backend(NamedTuple):
    """The family that runs a call; `target` is None if nothing is compiled."""

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
    return Backend(own_family(package, "portable"), target, interpreted=target is None)


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
        implementation: None for the best.
        operation: such as "flash_fwd".
        target: "sm80" or "sm90"; None for a device without kernels.
        interpretable: an interpreter can take the device's tensors.
        foreign: None may take a family of the other side, whose framework is then imported.

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
        interpreted = target is None and implementation is not None and interpretable
        if family.folder is None:
            reason = family.supports(operation, spec, target)
            interpreted, target = False, None
        elif interpreted and not family.has_interpreter:
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
