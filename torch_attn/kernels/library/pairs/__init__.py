"""Pairs of query and key: where a tile is, what it visits, its scores.

A kernel has no code for single masks and terms: these functions read `Mask` and `Terms`.
"""
