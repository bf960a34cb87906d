"""Indexed attention: each query attends to a few keys that an indexer has chosen for it.

visible   the keys that each query sees under a mask, and whether a choice keeps to them
choice    the keys with the largest scores of an indexer, the same at any split
chosen    a choice in place of a mask: what is asked for, checked and agreed on
lists     attention with a list of keys for each query, in plain torch
"""
