"""Interface of attention over the paged KV cache. Each platform implements it."""
