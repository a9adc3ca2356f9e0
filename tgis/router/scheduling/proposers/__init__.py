"""Proposers of draft tokens, which the shards verify."""
