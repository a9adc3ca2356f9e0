"""Reads GGUF files as checkpoints."""
