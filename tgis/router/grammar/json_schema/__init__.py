"""Adapts JSON schemas to the grammar library: parts that it handles wrongly are rewritten or rejected."""
