"""Formats, in which checkpoints store quantized weights."""
