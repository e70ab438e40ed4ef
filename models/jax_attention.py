"""Causal attention of the JAX model, by name.

Each function takes q [B, S, Hq, D] and k, v [B, S, Hkv, D], and returns [B, S, Hq, D].
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from models.config import ModelConfig
from pallas_attn import explain, flash_attention
from twin_attention.contract.validate import fail

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def twin(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Compute attention with this project's kernels; on a CPU with their reference."""
    return flash_attention(q, k, v, causal=True)


def xla(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Compute ``softmax(q kᵀ / sqrt(D)) v`` with all scores in memory."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Compute attention with cuDNN's kernels."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


ATTENTIONS: dict[str, Attend] = {"twin": twin, "cudnn": cudnn, "xla": xla}


def choose_attention(name: str, config: ModelConfig, dtype: jnp.dtype) -> Attend:
    """Return the attention of a name, if JAX's default device runs it for the model.

    Raises:
        ValueError: an unknown name.
        NotImplementedError: a head size, dtype or device that it does not take.
    """
    if name not in ATTENTIONS:
        fail(ValueError, "attention", f"one of {', '.join(ATTENTIONS)}", repr(name))
    if name == "twin":
        shape = (1, 1, config.num_heads, config.head_dim)
        q = jnp.zeros(shape, dtype)
        explain(flash_attention, q, q, q, causal=True)
    if name == "cudnn":
        device = jax.local_devices()[0]
        if device.platform != "gpu":
            fail(NotImplementedError, "attention", f"a CUDA device for {name!r}", device.platform)
        if jnp.dtype(dtype) not in (jnp.float16, jnp.bfloat16):
            got = jnp.dtype(dtype).name
            fail(NotImplementedError, "attention", "float16 or bfloat16 for 'cudnn'", got)
        if float(device.compute_capability) < 8.0:
            expected = "compute capability 8.0 or newer for 'cudnn'"
            fail(NotImplementedError, "attention", expected, device.compute_capability)
    return ATTENTIONS[name]
