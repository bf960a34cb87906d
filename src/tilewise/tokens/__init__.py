"""Verbs on the tokens of a split sequence, beside attention: what other layers need of neighbours.

pieces: the contiguous pieces of a rank's tokens; rows: rows that travel (halo, relayout, gather,
roll), differentiable; conv: short convolutions; scan: states that are carried along the sequence.
`ContextParallel` has each as a method.
"""
