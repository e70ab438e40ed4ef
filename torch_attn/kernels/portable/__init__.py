"""Triton kernels. Read each beside its twin in `pallas_attn.kernels.portable`."""
