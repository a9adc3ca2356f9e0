"""Readers of tensor files that nobody vouches for; nothing in a file is ever run."""
