"""Chat templates, which make a prompt of a chat."""
