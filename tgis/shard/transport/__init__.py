"""The shard's end of the link to its router."""
