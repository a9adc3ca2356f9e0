"""Model families, one module each: `MODEL_TYPES`, `spec` of a configuration, `sources` of tensors."""
