"""Declares the options of every command, each once, and checks their values."""
