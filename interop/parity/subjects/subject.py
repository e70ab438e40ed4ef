"""The interface of what parity runs: ours (`sides.Ours`) and others (`library.Library`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from twin_attention.interop.parity.cases import Case
from twin_attention.interop.parity.inputs import GRADIENTS, TANGENTS, Tensors

# From a case, its inputs and names of operands without gradients: outputs and gradients by name.
Run = Callable[..., Tensors]


class Subject:
    """Compute attention in any way.

    Attributes:
        target: what is compiled for; None for nothing.
        has_lse, has_gradients, has_dlse: what it returns besides out; has_dlse if gradients flow
            through the log-sum-exp too.
        has_tangents: it has forward mode.
        is_guarded: runs through torch's dispatcher with guarded memory as well.
    """

    label: str
    framework: str
    package: str
    version: str
    target: str | None
    has_lse: bool
    has_gradients: bool
    has_dlse: bool
    is_guarded: bool
    has_tangents: bool = False

    def supports(self, case: Case) -> str | None:
        """Return None, or the reason why not."""
        raise NotImplementedError

    def fit(self, case: Case) -> Case:
        """Return a case without some of the options that the subject lacks."""
        return case

    def by_default(self) -> Subject:
        """Return what runs if nothing is asked for by name."""
        return self

    def start(self) -> Run:
        """Return a function that keeps what it compiles."""
        raise NotImplementedError

    def explain(self, case: Case, inputs: Tensors) -> Any:
        """Return what runs, as text by `str`."""
        raise NotImplementedError


def taken_by(subject: Subject, inputs: Tensors) -> Tensors:
    """Return the inputs without gradients of what the subject does not return."""
    dropped = *GRADIENTS[subject.has_gradients * (1 + subject.has_dlse) :], *TANGENTS
    if subject.has_tangents:
        dropped = dropped[: -len(TANGENTS)]
    return {name: x for name, x in inputs.items() if name not in dropped}


def twins(group: Sequence[Subject]) -> list[tuple[Subject, Subject]]:
    """Return the pairs of a torch_attn and a pallas_attn."""
    sides = [[x for x in group if x.label.startswith(y)] for y in ("torch_attn ", "pallas_attn ")]
    return [(a, b) for a in sides[0] for b in sides[1]]
