"""The oracle: attention and its gradients written plainly, over any array-API library.

Everything is computed in one dtype, the caller's choice:

- float64 gives the reference that both implementations are checked against;
- the inputs' own dtype gives `lp`, the plain low-precision run that sets the error budget;
- float32 gives the ``"reference"`` implementation of `pallas_attn` and `torch_attn`. With
  `precision` "tf32" its products take the operands as tensor cores do, and it is that `lp` as well.

Memory is O(Sq · Skv). `formulas` has what every attention shares, `visibility` who sees whom, and
`kinds` the functions of each kind of problem.
"""
