"""Matrix products with weights of 4 or 8 bits that share scales in groups."""
