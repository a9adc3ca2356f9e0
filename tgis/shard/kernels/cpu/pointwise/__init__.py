"""Norms, activations and other kernels that compute each row or element by itself."""
