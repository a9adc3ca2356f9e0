"""Compiled kernels of gated DeltaNet layers."""
