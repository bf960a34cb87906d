"""Mask-aware placement: which rank computes which block, and how the values get there."""
