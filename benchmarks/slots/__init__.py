"""Other libraries' own code, unchanged, on our slots: what the pages of docs/integrations say.

Each module takes a clone of its library, of which nothing is kept here. They run on CPU, in an
environment that has what the library imports.
"""
