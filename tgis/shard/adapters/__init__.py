"""Loads soft prompts and LoRA adapters, and applies them in steps."""
