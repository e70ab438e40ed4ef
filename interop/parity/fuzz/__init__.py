"""Random problems of the whole contract: ``python -m interop.parity --fuzz SECONDS --seed N``.

- `problems` draws a case, the layout of its tensors, and what happens to saved tensors.
- `memory` surrounds tensors with NaN and finds writes outside the outputs.
- `trial` runs every implementation that supports a problem and checks it.
- `shrink` finds the smallest problem that fails in the same way.
- `command` runs problems in processes with time limits and prints failures.
"""
