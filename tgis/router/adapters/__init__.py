"""Soft prompts and LoRA adapters: look-up by id, and residency in the shards' memory."""
