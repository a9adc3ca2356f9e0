"""Fields of requests: how bodies are read, parameters checked, and refusals worded."""
