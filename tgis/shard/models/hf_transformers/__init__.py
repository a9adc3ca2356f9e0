"""Models run by transformers' own code, with this service's cache and attention."""
