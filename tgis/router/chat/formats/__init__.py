"""Formats in which models write tool calls and reasoning, one file per kind of model."""
