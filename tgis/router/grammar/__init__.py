"""Compiles the grammars of guided generation in separate processes."""
