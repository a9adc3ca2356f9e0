"""Triton kernels for NVIDIA GPUs, each in a file with its launch and its twin in torch operators.

A twin, `plain`, has the signature and the results of `launch`. It is the oracle of tests, and replaces the
kernel on GPUs for which the kernel does not compile or returns wrong results. Neither waits for the device
nor reads values from its memory, so both can be captured in a CUDA graph."""
