"""Memory of a shard, which is measured and divided at its start."""
