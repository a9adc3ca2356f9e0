"""Soft prompts and LoRA adapters: which are known, and which the shards hold loaded."""
