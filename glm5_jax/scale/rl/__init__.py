"""Plans reinforcement learning: how many chips should sample, and how many train."""
