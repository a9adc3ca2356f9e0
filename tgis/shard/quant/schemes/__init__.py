"""Schemes, which round the weights of a model when they are read."""
