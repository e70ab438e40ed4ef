"""Kernel families. Each file has the same path as its twin in `torch_attn.kernels`.

The twin says what both share: formulas, loop invariants, accumulation, what a masked row gives, and
what a function without a docstring does.
"""
