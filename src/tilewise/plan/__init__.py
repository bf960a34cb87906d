"""A plan: items, transfers, tiles, steps; its text and JSON; the builder of a rank's part."""
