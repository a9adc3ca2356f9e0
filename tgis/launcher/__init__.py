"""The launcher of each node. It starts, watches and stops the shards, and on node 0 the router too."""
