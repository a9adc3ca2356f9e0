"""Functions of kernels, and properties of devices."""
