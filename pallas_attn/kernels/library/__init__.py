"""Building blocks of the kernels of every family.

This package imports no family, and nothing from `pallas_attn.kernels.explicit`.
"""
