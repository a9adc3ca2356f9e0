"""Sends requests over each API, and receives the streams of their answers."""
