"""What parity runs: our families of kernels, and other libraries' attention."""
