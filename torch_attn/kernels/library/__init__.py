"""Building blocks of the kernels of every family; there are no kernels here.

Every family imports this package; it imports no family, and not `explicit`.
"""
