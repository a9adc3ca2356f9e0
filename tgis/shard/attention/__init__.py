"""Attention over the paged cache: the interface, and one implementation per platform."""
