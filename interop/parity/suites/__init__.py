"""The named problems, which tests, parity and benchmarks share: one module for each kind."""
