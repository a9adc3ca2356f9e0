"""Soft prompts and LoRA adapters that a shard holds loaded, and their use in a step."""
