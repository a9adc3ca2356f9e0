"""Declares the option names of other servers that the commands also accept."""
