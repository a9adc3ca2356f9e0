"""Norms, activations and other kernels that work on each row or element by itself."""
