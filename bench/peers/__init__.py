"""Measures other engines on the same checkpoint, each from PyPI in a separate virtual environment."""
