"""Preparation of the ranks of a model on their devices."""
