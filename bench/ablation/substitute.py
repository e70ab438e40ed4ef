"""Let a function call others than its module has."""

from __future__ import annotations

from collections.abc import Iterator
from functools import update_wrapper
from types import CodeType, FunctionType
from typing import Any


def with_names(function: FunctionType, **names: Any) -> FunctionType:
    """Return a copy of a function that sees other objects under these global names.

    Raises:
        ValueError: a name that neither the function nor one inside it uses.
    """
    missing = set(names) - set(_used(function.__code__))
    if missing:
        raise ValueError(f"names: expected globals of {function.__name__}, got {sorted(missing)}")
    copy = FunctionType(
        function.__code__,
        function.__globals__ | names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    update_wrapper(copy, function)
    del copy.__wrapped__
    return copy


def _used(code: CodeType) -> Iterator[str]:
    """Return the names that a function and those inside it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _used(constant)
