"""Runs cases on a GPU, each in a separate process, and collects their results."""
