"""Products of layers, with weights that are floats or codes."""
