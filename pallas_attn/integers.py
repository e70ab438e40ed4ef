"""Division of integers that are not negative, in kernels and in index maps."""

from operator import floordiv, mod

import numpy as np
from jax import lax


def quotient(a, b):
    """Return a // b, a >= 0 and b > 0: one operation, where `//` also asks for the signs."""
    return _without_signs(lax.div, floordiv, a, b)


def remainder(a, b):
    """Return a % b, a >= 0 and b > 0."""
    return _without_signs(lax.rem, mod, a, b)


def _without_signs(traced, static, a, b):
    if isinstance(a, int) and isinstance(b, int):
        return static(a, b)
    return traced(*(np.int32(x) if isinstance(x, int) else x for x in (a, b)))
