"""Shelf: everything that proposes tokens, one file a mechanism."""
