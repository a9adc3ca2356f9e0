"""Self-check of kernels against their twins when a shard starts."""
