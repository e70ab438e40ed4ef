"""Run our families of kernels, and other libraries' attention, alike."""
