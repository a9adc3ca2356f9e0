"""Models: the code that all families share, and one module of data for each family."""
