"""Ranks meshes for a training step, and compiles the best of them."""
