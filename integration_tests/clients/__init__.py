"""Unmodified clients of OpenAI's API, each in an environment of its own, against a launched service."""
