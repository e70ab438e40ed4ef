"""`jax.nn.dot_product_attention`, in XLA operations or in cuDNN's kernels."""

from __future__ import annotations

from typing import Literal

from bench.calls import jax_call
from bench.job import Call
from bench.peers.limits import HALF, check_flash
from interop.parity.cases import FlashCase


def flash(
    implementation: Literal["xla", "cudnn"], case: FlashCase, operation: str, tensors
) -> Call:
    """A call of the implementation, "xla" or "cudnn"; float32 is not rounded to TF32."""
    check_flash(case, dtypes=(*HALF, "float32") if implementation == "xla" else HALF)
    import jax

    def attend(q, k, v):
        with jax.default_matmul_precision("highest" if case.dtype == "float32" else "default"):
            return jax.nn.dot_product_attention(
                q, k, v, scale=case.scale, is_causal=case.causal, implementation=implementation
            )

    return jax_call(attend, operation, tensors)
