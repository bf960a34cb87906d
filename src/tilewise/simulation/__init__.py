"""A program timed on a machine that is described by numbers."""
