"""Commands, benchmark, network lab, reports: they use the library, and nothing of it uses them.

processes: worlds of local processes; doctor: what can run here.
"""
