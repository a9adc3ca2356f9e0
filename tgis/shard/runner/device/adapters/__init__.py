"""Adapters of the rows of a device."""
