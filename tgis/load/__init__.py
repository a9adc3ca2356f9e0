"""Generates load for a service, known only by its API, and measures the answers: `tgis bench`."""
