"""Interceptors of all gRPC calls."""
