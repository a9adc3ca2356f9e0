"""Reads the tensors of a checkpoint; only the requested parts are read."""
