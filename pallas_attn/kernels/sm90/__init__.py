"""Explicit kernels for SM90 in Mosaic GPU, twins of `torch_attn.kernels.sm90`; they need JAX
0.11.2.
"""
