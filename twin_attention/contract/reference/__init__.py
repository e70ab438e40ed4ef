"""The oracle: attention and its gradients written plainly, over any array-API library.

In the caller's dtype:

- float64 gives the reference that both implementations are checked against;
- the inputs' own dtype gives `lp`, the plain low-precision run that sets the error budget;
- float32 gives the ``"reference"`` implementation of `pallas_attn` and `torch_attn`. With
  `precision` "tf32" its products take operands as tensor cores do, and it also serves as `lp`.

Memory is O(Sq · Skv), or O(Tq · Tkv) of packed sequences. lse is a natural logarithm, and dlse may
be None for zero. A row that sees no key, such as padding, gives 0, and -inf or its head's sink.
"""
