"""Division of integers that are not negative, in kernels and in index maps."""

import numpy as np
from jax import lax


def quotient(a, b):
    """Return a // b, a >= 0 and b > 0: one operation, where `//` also asks for the signs."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    return lax.div(_in_32_bits(a), _in_32_bits(b))


def remainder(a, b):
    """Return a % b, a >= 0 and b > 0, of which one is traced."""
    return lax.rem(_in_32_bits(a), _in_32_bits(b))


def _in_32_bits(x):
    return np.int32(x) if isinstance(x, int) else x
