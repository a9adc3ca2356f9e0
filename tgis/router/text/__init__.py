"""Text to tokens, tokens to text, and stop sequences."""
