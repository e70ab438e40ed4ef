"""Building blocks of the kernels in Mosaic GPU: what JAX 0.11.2's lacks, and when each part can go.

The families `sm80`, `sm90` and `paged` import it; it imports `pallas_attn.kernels.library`.
"""
