"""Pairs of query and key. Kernels have no code for single masks and terms: it is here."""
