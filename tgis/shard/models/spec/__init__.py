"""Specifications of model families, and the reading of a checkpoint's config.json."""
