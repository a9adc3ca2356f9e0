"""Models, caches and arguments of kernels that a run on a GPU computes with."""
