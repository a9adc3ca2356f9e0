"""Makes of a GGUF file what the service reads: a configuration, a tokenizer, names of tensors."""
