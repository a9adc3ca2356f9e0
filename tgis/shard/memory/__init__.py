"""The paged KV cache, and the memory limits of host and GPU."""
