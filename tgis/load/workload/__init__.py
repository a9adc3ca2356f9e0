"""Makes what a measurement sends: conversations, their lengths and constraints, and the times of open loops."""
