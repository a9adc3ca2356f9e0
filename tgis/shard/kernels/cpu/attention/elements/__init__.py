"""Types of the cache's elements other than those of weights."""
