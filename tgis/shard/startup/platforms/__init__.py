"""Devices on which a shard computes, each with its kernels, attention and memory."""
