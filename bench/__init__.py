"""Measures the service as clients see it, beside transformers and the limits of the machine."""
