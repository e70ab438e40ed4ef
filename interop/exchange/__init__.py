"""Tensors across the frameworks: one memory, seen from PyTorch and from JAX.

`dlpack` hands tensors over and refuses what cannot be shared, `lifetime` keeps shared GPU
memory from being reused while the other framework still works on it.
"""

from interop.exchange.dlpack import to_jax, to_torch

__all__ = ["to_jax", "to_torch"]
