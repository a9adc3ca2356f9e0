"""Checks and measurements on a GPU at the start."""
