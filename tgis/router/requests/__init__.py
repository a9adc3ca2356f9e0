"""Handles calls before and after the engine: validation, accounting, logs and traces."""
