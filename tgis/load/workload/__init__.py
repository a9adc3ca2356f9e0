"""Makes what a measurement sends: conversations, and the times of open loops."""
