"""Compiler of kernels for GPUs that the machine does not have."""
