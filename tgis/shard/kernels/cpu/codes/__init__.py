"""Matrix products with codes of 2 to 8 bits that share scales in groups."""
