"""Pallas kernels, for the Triton lowering.

Read each beside its twin of the same name in `torch_attn.kernels.portable`.
"""
