"""Tilewise inside other libraries, each module imported only by the one who asks for it.

hf and the files named after it: models of transformers; data and documents: packed batches.
"""
