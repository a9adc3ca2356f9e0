"""The interface of attention over the paged KV cache. The kernels of each platform implement it."""
