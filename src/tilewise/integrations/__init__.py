"""Tilewise inside other libraries, each imported only by the one who asks for it."""
