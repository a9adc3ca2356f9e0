"""Compiled kernels of recurrent layers."""
