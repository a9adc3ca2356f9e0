"""Models that transformers' own code runs with this service's cache and attention."""
