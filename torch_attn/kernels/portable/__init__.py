"""Triton kernels. Read each beside its twin of the same name in `pallas_attn.kernels.portable`."""
