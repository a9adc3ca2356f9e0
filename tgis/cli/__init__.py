"""Defines the commands and turns their arguments and environment variables into configurations."""
