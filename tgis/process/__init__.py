"""Runs child processes: their heartbeats, their run directory, and the detection of cores and GPUs."""
