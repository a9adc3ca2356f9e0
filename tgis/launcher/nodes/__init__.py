"""Starts and kills the shards of a node: this one, or another one over the network."""
