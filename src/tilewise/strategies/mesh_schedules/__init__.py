"""When a tile's shards arrive, its blocks are computed and its partials leave."""
