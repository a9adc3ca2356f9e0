"""The public ports."""
