"""Implementations of the layers' operations (`Kernels`) and of attention, one package per platform."""
