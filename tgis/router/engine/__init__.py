"""Schedules steps, sends them to the shards and applies their answers."""
