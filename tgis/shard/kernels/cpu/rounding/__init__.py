"""Rounding of weights to codes while a model is loaded."""
