"""Kernels across the frameworks: of `torch_attn` in JAX, and of `pallas_attn` in PyTorch.

The sides know only `in_jax` and `in_torch`, which import the other framework when asked for a
kernel.
"""
