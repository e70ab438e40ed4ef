"""Building blocks of the kernels in Gluon: copies, products, barriers, registers, work items.

It has no kernels. It offers what Triton 3.6's Gluon lacks, or names differently from 3.9's. The
families `sm80` and `sm90` import this package; it imports `torch_attn.kernels.library`, and no
family.
"""
