"""Benchmarks of the kernels beside their peers; run ``python -m bench --help``."""
