"""Reads untrusted tensor files; no code in a file is ever run."""
