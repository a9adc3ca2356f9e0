"""Storage formats of quantized checkpoints."""
