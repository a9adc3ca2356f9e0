"""Metric series and counts of resources."""
