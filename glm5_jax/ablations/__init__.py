"""Ablations: studies of arms and seeds, run, measured and reported by one command."""
