"""Kernels of `torch_attn` in JAX.

`pallas_attn` knows only `in_jax`, which imports PyTorch when asked for a kernel.
"""
