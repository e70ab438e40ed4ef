"""Attention in JAX: `jax.nn`, JAX's own Pallas kernel, and tokamax."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import accumulate
from types import ModuleType
from typing import Literal

from bench.calls import jax_call
from bench.job import Absent, Call
from bench.peers.limits import HALF, check_flash, load
from twin_attention.interop.parity.cases import FlashCase

# Tokamax imports this profiler, which its attention does not use.
_XPROF = "xprof.cli.tools.get_kernel_stats_tool"


def jax_nn(
    implementation: Literal["xla", "cudnn"], case: FlashCase, operation: str, tensors
) -> Call:
    """XLA's operations or cuDNN's kernels; float32 is not rounded to TF32."""
    check_flash(case, dtypes=(*HALF, "float32") if implementation == "xla" else HALF)
    import jax

    def attend(q, k, v):
        with jax.default_matmul_precision("highest" if case.dtype == "float32" else "default"):
            return jax.nn.dot_product_attention(
                q, k, v, scale=case.scale, is_causal=case.causal, implementation=implementation
            )

    return jax_call(attend, operation, tensors)


def pallas_mha(case: FlashCase, operation: str, tensors) -> Call:
    """`jax.experimental.pallas.ops.gpu.attention.mha` with its block sizes."""
    check_flash(case, groups=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # in favour of tokamax, a peer as well
        module = load("jax.experimental.pallas.ops.gpu.attention")
    attend = partial(
        module.mha,
        segment_ids=None,
        sm_scale=case.spec.scale,
        causal=case.causal,
    )
    return jax_call(attend, operation, tensors)


def tokamax(implementation: str, case: FlashCase, operation: str, tensors) -> Call:
    """tokamax's "mosaic" or "triton" kernels as configured."""
    check_flash(case)
    with _xprof():
        module = load("tokamax")
    attend = partial(
        module.dot_product_attention,
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
    """Filter its long warnings that it is not autotuned."""

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
    """Replace xprof by empty modules if it is not installed."""
    stand_ins = {}
    if not find_spec("xprof"):
        names = accumulate(_XPROF.split("."), "{}.{}".format)
        stand_ins = {name: ModuleType(name) for name in names}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]
