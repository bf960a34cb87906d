"""Batches as training has them.

tree: sequences that share prefixes, every shared token computed once.
"""
