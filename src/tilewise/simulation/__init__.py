"""A program timed on a machine that is described by numbers.

costs and timeline_ops: a program with prices; engine: the event loop; network and fair_share: who
shares which link, and how; zigzag_causal: many ranks under a causal mask; machine_files: machines
as TOML.
"""
