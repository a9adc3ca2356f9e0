"""Compiles kernels for ARM processors on other machines, and runs them in qemu."""
