"""Proposers of drafts by speculators, which follow the rows' steps."""
