"""Compile kernels ahead, for images and clusters: ``python -m pallas_attn.warm calls.txt``.

Each call of the files (`twin_attention.targets.warm`) is compiled for the default device and not
run, flash attention with its gradients. Later processes find the kernels in the caches on disk.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp

import pallas_attn
from twin_attention.contract.validate.errors import fail
from twin_attention.targets import warm
from twin_attention.targets.warm import CallText


def compile_call(call: CallText) -> None:
    arrays = {}
    for name, (shape, dtype) in call.operands.items():
        try:
            arrays[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
        except TypeError:
            fail(ValueError, name, "a JAX dtype's name", repr(dtype))

    def run(arrays: dict[str, Any]) -> Any:
        return getattr(pallas_attn, call.function)(**arrays, **call.options)

    def gradients(arrays: dict[str, Any]) -> Any:
        differentiable = {
            name: x
            for name, x in arrays.items()
            if jnp.issubdtype(x.dtype, jnp.floating) and name not in call.constants
        }
        out, pullback = jax.vjp(lambda given: run(arrays | given), differentiable)
        return out, pullback(jax.tree.map(jnp.ones_like, out))

    jax.jit(gradients if call.has_gradients else run).lower(arrays).compile()


if __name__ == "__main__":
    sys.exit(warm.main("pallas_attn", compile_call, sys.argv[1:]))
