"""Training steps and inference of `models/`, for the suites "end-to-end" and "memory"."""
