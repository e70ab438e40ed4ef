"""Pause Python's collector of reference cycles where many objects are made that stay.

An import of PyTorch and the trace of a kernel make hundreds of thousands of objects. Again and
again the collector then walks over all objects of the process, in search of cycles, and finds few.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Let no collection begin by itself in the block, or until that of another thread ends."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
