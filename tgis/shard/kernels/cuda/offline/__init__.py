"""Compiles kernels in advance, on machines without the GPUs that they are for."""
