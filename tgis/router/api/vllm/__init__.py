"""vLLM's names: options of its command line, and series of its metrics."""
