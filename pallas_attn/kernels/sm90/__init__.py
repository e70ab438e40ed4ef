"""Explicit kernels for SM90 in Mosaic GPU; they need JAX 0.11.2."""
