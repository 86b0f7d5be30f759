"""The parts of asynchronous reinforcement learning that need no jax.

groups.py decides which groups of episodes begin, and which ones a step learns from.
simulator.py predicts how fast and how stale a run would be.
"""
