"""Quantized weights: schemes that quantize them while loading, and the formats of quantized checkpoints."""
