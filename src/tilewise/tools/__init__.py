"""Commands, benchmark, network lab, reports: they use the library, and nothing of it uses them."""
