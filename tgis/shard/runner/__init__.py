"""Model runner: the table of rows, and a step from its message to its response."""
