"""What is done for a call before and after the engine: validation, concurrency, accounting, logs, traces."""
