"""Training steps, for the suites "end-to-end", "hugging-face" and "memory"."""
