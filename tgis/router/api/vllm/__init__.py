"""Names of vLLM: options of its command line, and series of its metrics."""
