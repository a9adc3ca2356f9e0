"""Makes quantized checkpoints: GPTQ with calibration, and 8 bits per row without."""
