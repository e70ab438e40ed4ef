"""Raise one exception for whatever a library lacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# Texts of refusals by torch's backends and by XLA.
TEXTS = ("No available kernel", "not supported by dot_general", "Algorithm not supported")


class Absent(Exception):
    """Raised, with the reason, if a package is missing or refuses a problem."""


@contextmanager
def refusals() -> Iterator[None]:
    """Raise `Absent` for what a library says that it does not do."""
    try:
        yield
    except (NotImplementedError, RuntimeError, ValueError) as error:
        message = " ".join(str(error).split())
        if isinstance(error, NotImplementedError) or any(x in message for x in TEXTS):
            raise Absent(message) from error
        raise
