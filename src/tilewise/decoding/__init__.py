"""Attention of the next few tokens to keys and values that stay spread over ranks."""
