"""Client of a shard group: connection, message codec and artifact transfer."""
