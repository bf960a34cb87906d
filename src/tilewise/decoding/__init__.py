"""Attention of the next few tokens to keys and values that stay spread over ranks.

chunk: who holds the next tokens; step: one decoding step.
"""
