"""Provides listening ports, TLS, HTTP, and the framing and addresses of the link between router and
shards."""
