"""Converts a model's files to other formats, without using the network."""
