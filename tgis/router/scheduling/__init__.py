"""What the next step computes, in which rows and cache blocks."""
