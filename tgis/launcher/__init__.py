"""What runs on each node: the shards are started, on node 0 the router too, watched over and stopped."""
