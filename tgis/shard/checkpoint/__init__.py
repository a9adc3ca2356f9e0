"""Reads the requested parts of a checkpoint's tensors."""
