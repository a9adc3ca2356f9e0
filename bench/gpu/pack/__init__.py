"""Packs the files that a machine with a GPU and without a network needs besides its own packages."""
