"""Runs checks and measurements that need a GPU, within ten minutes, and compares them with predictions."""
