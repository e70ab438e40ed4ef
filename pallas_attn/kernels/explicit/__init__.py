"""Building blocks of the explicit kernels, in Mosaic GPU.

What registers and shared memory hold, copies, products, barriers, work items and launches have a
file each. So has what JAX 0.11.2 lacks, which is built in MLIR and says when it can go. No kernel
is here. It imports `library` and no family; the explicit families, `sm80`, `sm90` and `paged`,
import it.
"""
