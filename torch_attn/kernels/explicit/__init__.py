"""Building blocks of the Gluon kernels, and what only one of Triton 3.6 and 3.9 offers."""
