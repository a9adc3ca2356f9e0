"""Implements the launcher of a node: it starts, watches and stops the shards and, on node 0, the router."""
