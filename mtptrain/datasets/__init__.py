"""Shelf: raw rows of a prompts file to Conversations."""
