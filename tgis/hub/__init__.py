"""Finds and reads a model's files in the local cache of a model hub, and downloads them to it."""
