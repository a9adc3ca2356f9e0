"""Compiles kernels, caches their machine code, and helps to write LLVM code."""
