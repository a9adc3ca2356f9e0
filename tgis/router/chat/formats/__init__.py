"""Describes how models write calls of tools and reasoning: a file for each kind of model."""
