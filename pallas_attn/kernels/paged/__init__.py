"""Kernels of paged caches in Pallas's Mosaic GPU, for SM80 and SM90.

They copy with cp.async and multiply with mma.sync, which both have.
"""
