"""The slice kernel in Triton: forward, backward, delta, merge, and its blocks."""
