"""Find packages newer than the versions checked, and a JAX that is too old."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version


def newer_versions(tested: Mapping[str, tuple[int, int]]) -> str | None:
    """Return which packages are newer than the tested versions, two numbers each, or None."""
    found = []
    for name, known in tested.items():
        newest = _version(name)
        if newest is not None and newest > known:
            newer, older = (".".join(map(str, x)) for x in (newest, known))
            found.append(f"{name} {newer} is newer than {older}, the newest that was tested")
    return "; ".join(found) or None


@cache
def older_jax() -> str | None:
    """Return what JAX's version lacks for Mosaic GPU kernels, None for nothing."""
    found = version("jax")
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < (0, 11):
        return f"its kernels need jax 0.11 or newer, not {found}"
    return None


def _version(name: str) -> tuple[int, ...] | None:
    try:
        return tuple(map(int, version(name).split(".")[:2]))
    except (PackageNotFoundError, ValueError):
        return None
