"""Tables of what the papers measure, counted, simulated and measured here."""
