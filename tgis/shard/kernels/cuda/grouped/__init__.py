"""Kernels whose rows are grouped by LoRA adapter or expert, with the counts on the GPU."""
