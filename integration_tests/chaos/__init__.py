"""Runs a service with every feature on, under traffic with known responses, and causes random faults."""
