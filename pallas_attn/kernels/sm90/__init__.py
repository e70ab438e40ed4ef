"""Explicit kernels for SM90 in Mosaic GPU: TMA, wgmma and specialised warps, placed by hand.

They need JAX 0.11.2. Read each beside its twin of the same name in `torch_attn.kernels.sm90`.
"""
