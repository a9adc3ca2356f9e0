"""Chats: `/v1/chat/completions`."""
