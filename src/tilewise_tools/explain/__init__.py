"""A recorded run explained: where the step goes, for whom ranks wait, and what would change it."""
