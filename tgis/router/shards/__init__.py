"""Client of a shard group: connection, message codec and transfer of artifacts."""
