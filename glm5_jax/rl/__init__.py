"""Reinforcement learning: environments, rollouts, objectives."""
