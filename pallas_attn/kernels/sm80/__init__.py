"""Explicit kernels for SM80 in Mosaic GPU; they need JAX 0.11.2."""
