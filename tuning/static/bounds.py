"""Find loop bounds that a compiler made constant.

Triton 3.6 drops a number that a loop carries if only the bounds of an inner loop depend on it; the
inner loop then always begins or ends where it first did.
"""

from __future__ import annotations

import re

_LOOP = re.compile(r"scf\.for %\S+ = %(\S+) to %(\S+) step ")


def fixed_bounds(before: str, after: str) -> int:
    """Return how many loop bounds a compiler's passes made constant, of two texts in MLIR.

    Constants are called "%c".
    """
    return max(0, _variable_bounds(before) - _variable_bounds(after))


def _variable_bounds(mlir: str) -> int:
    bounds = (bound for loop in _LOOP.findall(mlir) for bound in loop)
    return sum(not re.match(r"c-?\d", bound) for bound in bounds)
