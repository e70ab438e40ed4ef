"""Building blocks of every family's kernels. This imports no family, and not `explicit`."""
