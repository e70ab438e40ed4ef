"""Processes that have imported torch and Triton, and nothing of this project."""

import multiprocessing
from collections.abc import Callable
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "triton"])


def run(function: Callable[..., Any], *arguments: Any) -> None:
    """Call a function in a process of its own; assert that it returns within five minutes."""
    process = _CONTEXT.Process(target=function, args=arguments)
    process.start()
    process.join(300)
    process.kill()
    assert process.exitcode == 0
