"""Child processes, their heartbeats, their run directory, and the GPUs they may use."""
