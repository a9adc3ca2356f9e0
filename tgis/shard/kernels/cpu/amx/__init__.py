"""Matrix products with the tile registers of AMX."""
