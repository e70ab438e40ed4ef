"""Raise one exception for whatever a library lacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# Texts of refusals: torch's backends, XLA, Pallas kernels of JAX, its cuDNN, jvp-flash-attention,
# the cuDNN frontend.
TEXTS = (
    "No available kernel", "is not correctly aligned", "not supported by dot_general",
    "Algorithm not supported", "must be a multiple of block", "must have same seq length as QKV",
    "JVPAttn expected", "supported head dimensions are",
)  # fmt: skip


class Absent(Exception):
    """Raised, with the reason, if a package is missing or refuses a problem."""


@contextmanager
def refusals() -> Iterator[None]:
    """Raise `Absent` for what a library says that it does not do."""
    try:
        yield
    except (NotImplementedError, RuntimeError, ValueError, AssertionError) as error:
        message = " ".join(str(error).split())
        if isinstance(error, NotImplementedError) or any(x in message for x in TEXTS):
            raise Absent(message) from error
        raise
