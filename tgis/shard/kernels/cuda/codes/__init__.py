"""Products with weights that a GPU keeps as codes of 4 or 8 bits."""
