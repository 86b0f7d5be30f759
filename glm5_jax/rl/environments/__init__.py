"""Environments: what a model is asked to do, and what it earns."""
