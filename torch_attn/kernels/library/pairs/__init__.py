"""Pairs of query and key: who sees whom, what is added to a score, and what dropout keeps.

A program has the `Rows` of one tile, of queries or of keys, and visits tiles of the other axis. Its
kernel has no code for single masks and terms: these functions read `Mask` and `Terms`.
"""
