"""Explicit kernels for SM90 in Gluon: TMA, wgmma and warps of different work, placed by hand."""
