"""Reads a model's text as reasoning, content and calls of tools."""
