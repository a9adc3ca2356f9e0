"""Attention on AMX tiles."""
