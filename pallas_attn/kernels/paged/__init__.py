"""Kernels of paged caches in Pallas's Mosaic GPU, for SM80 and SM90.

They use cp.async and mma.sync, which both targets have.
"""
