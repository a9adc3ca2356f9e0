"""Locates, reads and downloads a model's files in the local cache of a model hub."""
