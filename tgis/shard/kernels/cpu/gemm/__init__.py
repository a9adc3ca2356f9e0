"""Matrix products with packed float weights."""
