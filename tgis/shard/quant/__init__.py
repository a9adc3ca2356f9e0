"""Quantized weights: schemes that round them when they are read, and the formats of checkpoints."""
