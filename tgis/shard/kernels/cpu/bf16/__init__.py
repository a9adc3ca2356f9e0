"""Matrix products with bfloat16 arithmetic."""
