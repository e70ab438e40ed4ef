"""The suites, and the choice of a kind's cases from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from interop.parity.cases import Case

# A case's name says what it covers; its suite says how large it is.
SUITES = (
    "quick",  # small enough for the frameworks' interpreters on a CPU
    "full",  # every feature, dtype and awkward size, a few hundred tokens long (contains quick)
    "large",  # sizes that only a GPU takes, tensors past 2^31 elements among them
)

Change = tuple[str, dict[str, Any]]  # part of a case's name, and the fields that differ
C = TypeVar("C", bound=Case)
Make = Callable[[], Iterator[C]]


def choose(suite: str, pattern: str, quick: Make[C], full: Make[C], large: Make[C]) -> list[C]:
    """Return a suite's cases from these functions, whose names contain `pattern`."""
    makers = {"quick": [quick], "full": [quick, full], "large": [large]}[suite]
    return [case for make in makers for case in make() if pattern in case.name]
