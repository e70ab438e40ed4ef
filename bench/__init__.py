"""Benchmarks and static checks of the kernels; run ``python -m bench --help``."""
