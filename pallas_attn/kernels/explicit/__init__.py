"""Building blocks of the kernels in Mosaic GPU: copies, products, barriers, registers, work items.

There is no kernel in it. What JAX 0.11.2's Mosaic GPU does not offer is written by hand in these
files, and says when it can go. The families `sm80`, `sm90` and `paged` import it; it imports
`pallas_attn.kernels.library`, and no family.
"""
