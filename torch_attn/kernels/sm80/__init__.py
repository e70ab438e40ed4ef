"""Explicit kernels for SM80 in Gluon: cp.async, ldmatrix and mma.sync, placed by hand."""
