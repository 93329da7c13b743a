"""Shelf: `base` is a transformers model with taps; a file only for what a family or a source does differently."""
