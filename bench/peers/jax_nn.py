"""`jax.nn.dot_product_attention`, in XLA operations or in cuDNN's kernels."""

from __future__ import annotations

from functools import partial

from bench.calls import jax_call
from bench.job import Call
from bench.peers.limits import HALF, check_flash
from interop.contract.cases import FlashCase


def flash(implementation: str, case: FlashCase, operation: str, tensors) -> Call:
    """A call of the implementation, "xla" or "cudnn"."""
    dtypes = (*HALF, "float32") if implementation == "xla" else HALF
    check_flash(case, dtypes=dtypes)
    from jax.nn import dot_product_attention

    attend = partial(
        dot_product_attention,
        scale=case.scale,
        is_causal=case.causal,
        implementation=implementation,
    )
    return jax_call(attend, operation, tensors)
