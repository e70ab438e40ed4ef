"""Compare both implementations on the same tensors, with one error budget."""
