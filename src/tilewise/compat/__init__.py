"""Other libraries' own names and signatures, run by tilewise."""
