"""The oracle: attention and its gradients written plainly, over any array-API library.

Everything is computed in one dtype, the caller's choice:

- float64 gives the reference that both implementations are checked against;
- the inputs' own dtype gives `lp`, the plain low-precision run that sets the error budget;
- float32 gives the ``"reference"`` implementation of `pallas_attn` and `torch_attn`. With
  `precision` "tf32" its products take operands as tensor cores do, and it also serves as `lp`.

Memory is O(Sq · Skv). `formulas` has what every attention shares, `visibility` the masks, and
`kinds` the functions for each kind of problem.
"""
