"""One module per family: MODEL_TYPES it serves, `spec` of a configuration, `sources` of its tensors."""
