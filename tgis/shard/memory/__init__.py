"""The paged key-value cache, and the limits of memory on host and GPU."""
