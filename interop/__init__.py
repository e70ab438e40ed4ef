"""What the two halves of twin-attention share: the contract, the exchange of tensors, the parity harness."""
