"""Implements `tgis client`, which calls a running service."""
