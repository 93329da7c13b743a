"""Shelf: where raw rows come from, and the layouts that need code; `mtptrain.data` puts them together."""
