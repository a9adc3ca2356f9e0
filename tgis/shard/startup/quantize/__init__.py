"""Checks of `--quantize` at the start of a shard."""
