"""Batches as training has them.

schedule: a stream of documents as steps of all ranks; tree: sequences that share prefixes, each
shared token computed once.
"""
