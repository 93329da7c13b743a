"""Data in: rows of any known layout to the conversations of a run, every row accounted for."""
