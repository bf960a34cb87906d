"""Modules with another library's names and signatures, each to stand where its own was."""
