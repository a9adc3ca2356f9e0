"""Proposers of draft tokens that the shards verify."""
