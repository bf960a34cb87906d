"""Tiles for the plain causal mask: blocks, who reads what, and the order of transfers."""
