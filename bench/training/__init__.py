"""Whole training steps of `models/`, for the suites "end-to-end" and "memory"."""
