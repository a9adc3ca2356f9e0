"""Implementations of the layers' operations and of attention, by platform."""
