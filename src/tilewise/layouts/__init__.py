"""Which tokens each rank holds, and what a mask needs of two shards."""
