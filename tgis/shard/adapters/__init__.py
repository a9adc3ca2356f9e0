"""Soft prompts and LoRA adapters that a shard has loaded, and their use in a step."""
