"""Matrix products with int8 weights and activations."""
