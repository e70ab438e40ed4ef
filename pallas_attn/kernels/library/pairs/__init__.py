"""Pairs of query and key: the only functions that read single masks and terms."""
