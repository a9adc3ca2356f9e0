"""Client of a group of shards: connection, message codec and transfer of artifacts."""
