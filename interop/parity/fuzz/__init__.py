"""Random problems of the whole contract: ``python -m interop.parity --fuzz SECONDS --seed N``.

- `problems` draws a problem: a case of `interop.parity.cases`, how its tensors lie in memory, and
  what becomes of tensors that autograd saves.
- `memory` lays tensors out with NaN around them, and finds what a call writes outside its outputs.
- `trial` runs every implementation that supports a problem, and checks it by the error budget.
- `shrink` looks for the smallest problem that fails in the same way.
- `command` runs problems in processes under a watchdog, counts them, and prints what failed.
"""
