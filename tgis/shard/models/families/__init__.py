"""Model families. Each module has `MODEL_TYPES`, `spec` (reads a configuration) and `sources` (names of
tensors)."""
