"""Triton kernels for NVIDIA GPUs, each in a file with its launch and its twin in torch operators.

A twin, `plain`, has the signature of `launch` and gives the same results. It is the oracle of tests, and
takes the kernel's place on a GPU for which the kernel does not compile or computes something else. Neither
waits for the device, and neither looks at values in its memory: both can be captured in a CUDA graph."""
