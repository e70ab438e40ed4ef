"""Kernel families. Each file has the same path as its twin in `torch_attn.kernels`."""
