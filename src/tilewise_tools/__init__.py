"""Commands, benchmark, network lab, reports: they use the library, and nothing of it uses them.

cli: one file per command; bench: the benchmark; lab: a network on one machine; doctor: what can run
here.
"""
