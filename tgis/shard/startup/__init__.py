"""Starts a shard: builds a ready model runner from a configuration."""
