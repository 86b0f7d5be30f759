"""Checkpoints of runs: saving, verifying, restoring, and pruning steps."""
