"""`tokamax.dot_product_attention`, in its Mosaic or Triton kernels, not autotuned.

Importing tokamax imports xprof, a profiler that the attention does not use; where it is not
installed, empty modules stand in for it during that import.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from types import ModuleType

from bench.calls import jax_call
from bench.job import Absent, Call
from bench.peers.limits import check_flash, load
from interop.parity.cases import FlashCase

_IMPORTED = "xprof.cli.tools.get_kernel_stats_tool"  # by tokamax


def flash(implementation: str, case: FlashCase, operation: str, tensors) -> Call:
    """A call of the implementation, "mosaic" or "triton", with the configuration it comes with."""
    check_flash(case)
    with _xprof():
        tokamax = load("tokamax")
    attend = partial(
        tokamax.dot_product_attention,
        scale=case.spec.scale,
        is_causal=case.causal,
        implementation=implementation,
    )
    try:
        with _not_autotuned():
            call = jax_call(attend, operation, tensors)
            call.run()
    except NotImplementedError as error:
        raise Absent(f"not implemented there: {error}") from error
    return call


@contextmanager
def _not_autotuned() -> Iterator[None]:
    """Leave out its warnings that it is not autotuned, pages of text for every call compiled."""

    def is_other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Autotuning cache miss")

    logger = logging.getLogger("absl")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


@contextmanager
def _xprof() -> Iterator[None]:
    """Let tokamax import xprof inside the block, where it is not installed."""
    stand_ins = {}
    if not find_spec("xprof"):
        names = accumulate(_IMPORTED.split("."), "{}.{}".format)
        stand_ins = {name: ModuleType(name) for name in names}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]
