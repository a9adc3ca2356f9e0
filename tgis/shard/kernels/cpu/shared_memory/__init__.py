"""Collectives of ranks on one machine, in memory that they share."""
