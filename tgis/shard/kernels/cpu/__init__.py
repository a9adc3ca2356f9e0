"""Kernels for CPUs, compiled from Python by numba and LLVM."""
