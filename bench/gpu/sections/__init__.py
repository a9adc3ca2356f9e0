"""Sections of `python -m bench.gpu`, each a program."""
