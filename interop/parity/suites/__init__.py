"""The named problems that tests, parity and benchmarks share, by kind."""
