"""Benchmarks of the kernels beside their peers."""
