"""Runs the Shepherd Model Gateway as deployment/gateway does, without a cluster."""
