"""What tests of checkpoints share: a small state, a folder, and steps in it."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import parameterized

from glm5_jax.checkpoint import manager as manager_lib

OPTIMIZER = optax.partition(
    {"adamw": optax.adamw(1e-3), "frozen": optax.set_to_zero()},
    {"w": "adamw", "frozen": {"b": "frozen"}},
)
METADATA = {"config": {"optim": {"learning_rate": 2e-4}}, "fingerprint": "abc"}


def make_state(step, width=32):
    """Parameters, optimizer and counter, another at each step."""
    w = jnp.arange(width * 64, dtype=jnp.float32).reshape(width, 64) + step
    params = {"w": w, "frozen": {"b": jnp.full([3], step, jnp.bfloat16)}}
    # Moments that differ take the largest file: one of zeros is as small as an index.
    _, opt_state = OPTIMIZER.update(params, OPTIMIZER.init(params), params)
    return {"params": params, "opt_state": opt_state, "step": jnp.int32(step)}


def abstract(tree):
    """Shapes and types."""
    return jax.eval_shape(lambda: tree)


def assert_same(got, want):
    """To the bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


class StepsTestCase(parameterized.TestCase):
    """A test with a run's folder."""

    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir())
        self.checkpoints = self.folder / "checkpoints"

    def open(self, keep=3):
        """A manager that is closed at the end."""
        manager = manager_lib.CheckpointManager(self.folder, keep)
        self.addCleanup(manager._orbax.close)
        return manager

    def write_steps(self, *steps, keep=3, metadata=METADATA):
        """Saves them as one run does."""
        manager = self.open(keep)
        for step in steps:
            manager.save(step, make_state(step), metadata)
        manager.close()

    def with_steps(self, *steps):
        """A manager of a folder with these."""
        self.write_steps(*steps)
        return self.open()

    def step_folder(self, step):
        """Of a step."""
        return self.checkpoints / str(step)

    def names(self):
        """What is in checkpoints/."""
        return sorted(path.name for path in self.checkpoints.iterdir())
