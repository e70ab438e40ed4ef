"""JAX's own Pallas attention, `jax.experimental.pallas.ops.gpu.attention.mha`."""

from __future__ import annotations

import warnings
from functools import partial

from bench.calls import jax_call
from bench.job import Call
from bench.peers.limits import check_flash, load
from interop.parity.cases import FlashCase


def flash(case: FlashCase, operation: str, tensors) -> Call:
    """A call with the block sizes that it comes with."""
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
