"""Fields that several routes' requests share, and their meaning."""
