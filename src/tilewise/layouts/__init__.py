"""Layouts: which tokens each rank owns, and what a mask needs of two shards.

layout: the value, how its rows are written as runs, and the plain layouts; documents: each document
split over all ranks; balanced: layouts made for a mask, and the layout by default; joint: tokens
that every rank holds; cells: the pairs of two shards that a mask allows.
"""

from tilewise.layouts.layout import Layout, Run

__all__ = ["Layout", "Run"]
