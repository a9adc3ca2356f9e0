"""Paged attention on the CPU."""
