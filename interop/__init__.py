"""What the two halves of twin-attention share: contract, exchange of tensors, parity harness."""
