"""What a plan is: items, transfers, tiles and steps; its text and JSON forms; the builder of a rank's part."""
