"""Building blocks of the Gluon kernels, including what only one of Triton 3.6 and 3.9 offers.

The families `sm80` and `sm90` import it; it imports `torch_attn.kernels.library`, and no family.
"""
