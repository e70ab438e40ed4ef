"""Building blocks of every family's kernels, in Pallas.

Tiles, scores, the softmax, packed sequences, segments, block masks, the order of programs and pages
have a file each, with the host functions that prepare their arguments. No kernel is here. It
imports no family and nothing of `explicit`; every file of `kernels` may import it.
"""
