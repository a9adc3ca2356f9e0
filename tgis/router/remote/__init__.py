"""Doors and engine in processes of their own: both halves of a handle, and what they say to each other."""
