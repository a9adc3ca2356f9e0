"""Kernels in plain torch operators, for any device."""
