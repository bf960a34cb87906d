"""A tile of a plan meets layout and mask: the few kernel calls that compute it."""
