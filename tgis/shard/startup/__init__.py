"""Starts a shard: builds a model runner that is ready to answer from a configuration."""
