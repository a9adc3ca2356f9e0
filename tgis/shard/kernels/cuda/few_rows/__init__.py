"""Products of few rows with matrices of floats."""
