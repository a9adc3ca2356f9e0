"""Functions that kernels call, and what launches ask of a device."""
