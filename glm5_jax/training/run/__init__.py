"""One run: its folder, state, checkpoints, signals, and health."""
