"""The code that a GPU runs: its own generation's, or SM80 code on a Hopper card.

So SM80 (Ampere) kernels can be tested without an Ampere card. Set the environment variable
``TWIN_ATTENTION_TARGET=sm80`` before this module is imported, or::

    from twin_attention.targets.target import use_target

    with use_target("sm80"):
        out = torch_attn.flash_attention(q, k, v)

The switch is process-wide; a jitted function keeps the target under which JAX traced it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from twin_attention.contract.validate.errors import fail
from twin_attention.contract.validate.options import check_choice

TARGETS = ("sm80", "sm90")
# Bytes of shared memory per block: an A100's, and an H100's or H200's.
SHARED_MEMORY_LIMIT = {"sm80": 163 * 1024, "sm90": 227 * 1024}
SHARED_MEMORY_OF_SMALLER_CARDS = 99 * 1024  # compute capability 8.6, 8.9 and 12.0
NUM_SMS = {"sm80": 108, "sm90": 132}  # of an A100 and of an H100 or H200


class Card(NamedTuple):
    """A GPU to compile kernels for, present or not; `shared_memory` is bytes per block."""

    capability: int
    num_sms: int
    shared_memory: int


_VARIABLE = "TWIN_ATTENTION_TARGET"
_environment = os.environ.get(_VARIABLE) or None
_override: str | None = None


def requested_target() -> str | None:
    """Return the target that was asked for, or None for the device's own."""
    if _override is not None:
        return _override
    if _environment is not None:
        check_choice(_VARIABLE, _environment, TARGETS)
    return _environment


@contextmanager
def use_target(target: str | None) -> Iterator[None]:
    """Run the code of `target` ("sm80" or "sm90") inside the block; None changes nothing.

    Raises:
        ValueError: no such target.
    """
    global _override
    check_choice("target", target, TARGETS)
    before, _override = _override, target if target is not None else _override
    try:
        yield
    finally:
        _override = before


def resolve_target(capability: tuple[int, int]) -> str:
    """Return the target to compile for on a device of this compute capability."""
    if capability < (8, 0):
        got = f"{capability[0]}.{capability[1]}"
        fail(NotImplementedError, "device", "compute capability 8.0 or newer", got)
    native = "sm90" if capability[0] == 9 else "sm80"
    requested = requested_target() or native
    if requested == "sm90" and native != "sm90":
        fail(NotImplementedError, _VARIABLE, f"sm80 on this {native} device", requested)
    return requested
