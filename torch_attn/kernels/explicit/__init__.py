"""Building blocks of the explicit kernels, in Gluon.

What registers and shared memory hold, copies, products, barriers, work items and what Triton's
versions lack have a file each, with the host functions that prepare their arguments. No kernel is
here. It imports `library` and no family; the explicit families, `sm80` and `sm90`, import it.
"""
