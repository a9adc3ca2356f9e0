"""Kernels for weights that a GPU keeps as codes of 4 or 8 bits, and their memory layout."""
