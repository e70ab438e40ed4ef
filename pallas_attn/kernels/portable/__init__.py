"""Pallas kernels, for the Triton lowering."""
