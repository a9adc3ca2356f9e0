"""Drafts of a speculator on a device."""
