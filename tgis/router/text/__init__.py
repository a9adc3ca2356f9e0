"""Tokenization, detokenization and stop sequences."""
