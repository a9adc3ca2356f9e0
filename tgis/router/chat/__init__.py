"""Chats: renders them to prompts with templates, and parses the answers."""
