"""A program run on tensors, forward and backward.

A call is checked and resolved (resolve), the ranks agree on it (agree), torch's autograd runs it
(autograd; operator, where something follows operators), as two passes (forward_backward), each a
code that is bound once and then run (run) in memory that passes share (workspace).
"""
