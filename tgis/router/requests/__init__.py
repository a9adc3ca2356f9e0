"""Handling of a call before and after the engine: validation, concurrency limit, accounting, logs and
traces."""
