"""Building blocks of the kernels in Mosaic GPU: copies, products, barriers, registers, work items.

It has no kernels. These files write by hand what JAX 0.11.2's Mosaic GPU does not offer, and say
when it can go. The families `sm80`, `sm90` and `paged` import this package; it imports
`pallas_attn.kernels.library`, and no family.
"""
