"""Runs unmodified clients of OpenAI's API, each in a separate environment, against a launched service."""
