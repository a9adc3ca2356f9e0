"""The shard server, one process per rank: loads the weights, keeps the KV cache, runs steps and samples."""
