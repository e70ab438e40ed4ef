"""Building blocks of the kernels in Gluon: copies, products, barriers, registers, work items.

There is no kernel in it. What Triton 3.6's Gluon does not offer, or has under another name than
3.9's, is in these files. The families `sm80` and `sm90` import it; it imports
`torch_attn.kernels.library`, and no family.
"""
