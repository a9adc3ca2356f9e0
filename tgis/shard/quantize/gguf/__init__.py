"""Writes a checkpoint as a GGUF file."""
