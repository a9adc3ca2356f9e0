"""Locates, checks and copies soft prompts and LoRA adapters on disk."""
