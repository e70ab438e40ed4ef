"""Kernel families. The path of a file is the same as its twin's in `pallas_attn.kernels`."""
