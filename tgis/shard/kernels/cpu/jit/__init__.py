"""Compiler of kernels, cache of their machine code, and helpers for LLVM code."""
