"""Soft prompts and LoRA adapters: look-up by id, and the decision which ones the shards keep loaded."""
