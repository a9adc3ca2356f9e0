"""Compiled kernels that recurrent layers of all kinds share."""
