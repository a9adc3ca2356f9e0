"""Quantizes checkpoints: by GPTQ with calibration, or to 8 bits with a scale per row."""
