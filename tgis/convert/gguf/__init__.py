"""Converts a GGUF file's metadata to a configuration, a tokenizer and names of tensors."""
