"""Kernel families. A file has the same path as its twin in `pallas_attn.kernels`."""
