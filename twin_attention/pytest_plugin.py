"""A plugin of pytest for authors of kernels: the fixture `check_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

# Parameters of `check_attention`, as options of the command.
OPTIONS = {"seconds": float, "seed": int, "longest": int, "device": str, "problem": str}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attention", "the fixture check_attention")
    for name, kind in OPTIONS.items():
        text = f"in place of what tests pass as {name}"
        group.addoption(f"--attention-{name}", type=kind, default=None, help=text)


@pytest.fixture
def check_attention(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`twin_attention.testing.check_attention`, where the command's options come first."""
    from twin_attention import testing  # imports frameworks

    given = {x: request.config.getoption(f"--attention-{x}") for x in OPTIONS}
    chosen = {x: y for x, y in given.items() if y is not None}
    return lambda *arguments, **options: testing.check_attention(*arguments, **options | chosen)
