"""Orders in which a mesh tile's shards arrive, its blocks are computed and its partials leave."""
