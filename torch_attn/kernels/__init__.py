"""Kernel families. Each file has the same path as its twin in `pallas_attn.kernels`."""
