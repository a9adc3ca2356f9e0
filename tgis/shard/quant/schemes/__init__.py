"""Schemes that quantize the weights of a model while loading."""
