"""Tilewise inside other libraries, each module imported only by the one who asks for it.

hf and hf_masks: models of transformers; data: data loaders and packed batches.
"""
