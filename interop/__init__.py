"""Both frameworks at once: exchange of tensors, and the parity harness."""
