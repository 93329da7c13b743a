"""Shelf of training losses: one file, one formula; `base` owns everything else."""
