"""The loop that schedules steps, sends them to the shards and passes on their answers."""
