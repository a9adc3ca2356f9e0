"""Tuned soft prompts."""
