"""Pages to look at: one candidate on its cluster, or the rows of a benchmark."""
