"""A service with everything switched on, under traffic whose answers are known, and faults at random."""
