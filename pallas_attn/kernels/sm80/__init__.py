"""Explicit kernels for SM80 in Mosaic GPU: cp.async, ldmatrix and mma.sync, placed by hand.

They need JAX 0.11.2. Read each beside its twin of the same name in `torch_attn.kernels.sm80`.
"""
