"""Serves HTTP ports with limits on time, size and number of connections."""
