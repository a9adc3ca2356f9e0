"""Metric series and resource counts."""
