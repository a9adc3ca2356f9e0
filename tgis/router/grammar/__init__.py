"""Compiles the grammars of guided generation in a process of its own."""
