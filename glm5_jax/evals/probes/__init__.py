"""Probes: suites that look into a model while it reads held-out rows, a file each."""
