"""Soft prompts and LoRA adapters on disk: finding, checking and copying them."""
