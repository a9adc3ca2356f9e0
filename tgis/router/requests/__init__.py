"""Handling of a call before and after the engine: validation, concurrency, accounting, logs and traces."""
