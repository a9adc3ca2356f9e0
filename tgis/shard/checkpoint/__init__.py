"""Reads the tensors of a checkpoint, and only the parts that are asked for."""
