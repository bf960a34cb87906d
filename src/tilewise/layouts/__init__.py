"""Layouts: which tokens each rank owns, and what a mask needs of two shards.

layout: the value and the plain layouts; runs: how its rows are written; documents: each document
split over all ranks; balanced: layouts made for a mask, and the layout by
default; cells: the pairs of two shards that a mask allows.
"""

from tilewise.layouts.layout import Layout, Run

__all__ = ["Layout", "Run"]
