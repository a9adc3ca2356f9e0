"""Proposers of draft tokens for the shards to verify."""
