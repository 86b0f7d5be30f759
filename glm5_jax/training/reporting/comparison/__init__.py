"""Compares runs by what is in their folders; imports no jax."""
