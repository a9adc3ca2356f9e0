"""Creates the models, caches and kernel arguments for a run on a GPU."""
