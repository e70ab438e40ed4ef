"""Kernels of paged caches in Mosaic GPU: cp.async and mma.sync, for SM80 and SM90."""
