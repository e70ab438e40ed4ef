"""Pairs of query and key: who sees whom, what is added to a score, and what dropout keeps.

A program has the `Rows` of one tile, of queries or of keys, and visits tiles of the other axis. Its
kernel names no mask and no term: only these functions read `Mask` and `Terms`.
"""
