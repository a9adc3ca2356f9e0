"""The model runner: it keeps the row table and computes a step from its request to its response."""
