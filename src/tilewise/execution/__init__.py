"""A program run on tensors: forward and backward pass, buffers, partials."""
