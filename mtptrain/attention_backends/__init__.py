"""Shelf: one file is one way to compute attention over packed, paged batches."""
