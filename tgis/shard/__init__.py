"""One process per rank: weights, cache, forward, sample."""
