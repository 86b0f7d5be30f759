"""Tasks at a terminal: a sandbox with files, an instruction, and what must hold after.

draft.py says what a task is made of, families/ make them from seeds, world.py plays
them.
"""

from glm5_jax.environments.worlds.terminal.world import Terminal

__all__ = ["Terminal"]
