"""The comparison of kernels with their twins when a shard starts."""
