"""Shard's end of the connection to its router."""
