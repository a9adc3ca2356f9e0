"""Checks and measurements that only a GPU can give, within ten minutes, beside what was predicted."""
