"""Child processes, their signs of life, their run directory, and the GPUs they may use."""
