"""Models as data: what every family shares, and a file for each family."""
