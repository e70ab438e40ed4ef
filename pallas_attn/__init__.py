"""Attention kernels in JAX Pallas, the twins of `torch_attn`'s Triton kernels."""

from pallas_attn.api import explain, flash_attention

__all__ = ["explain", "flash_attention"]
