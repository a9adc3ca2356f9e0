"""Ports of HTTP APIs: authentication, routing, counts of answers and metrics."""
