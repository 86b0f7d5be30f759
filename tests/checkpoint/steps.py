"""Helpers for tests of checkpoints: a small state, a folder, and steps in it."""

import functools
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


@functools.partial(jax.jit, static_argnums=1)  # else each operation is a program
def make_state(step, width=32):
    """Returns parameters, optimizer state and counter, different at each step."""
    w = jnp.arange(width * 64, dtype=jnp.float32).reshape(width, 64) + step
    params = {"w": w, "frozen": {"b": jnp.full([3], step, jnp.bfloat16)}}
    # Different moments make the largest file; zeros would compress to almost nothing.
    _, opt_state = OPTIMIZER.update(params, OPTIMIZER.init(params), params)
    return {
        "params": params,
        "opt_state": opt_state,
        "step": jnp.asarray(step, jnp.int32),
    }


def abstract(tree):
    """Returns the shapes and types of the state."""
    return jax.eval_shape(lambda: tree)


def assert_same(got, want):
    """Compares two states bit for bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


class StepsTestCase(parameterized.TestCase):
    """Gives each test a run's folder."""

    def setUp(self):
        super().setUp()
        self.folder = pathlib.Path(self.create_tempdir())
        self.checkpoints = self.folder / "checkpoints"

    def open(self, keep=3):
        """Opens a manager, which is closed at the end of the test."""
        manager = manager_lib.CheckpointManager(self.folder, keep)
        self.addCleanup(manager._orbax.close)
        return manager

    def write_steps(self, *steps, keep=3, metadata=METADATA):
        """Saves steps as one run does."""
        manager = self.open(keep)
        for step in steps:
            manager.save(step, make_state(step), metadata)
        manager.close()

    def with_steps(self, *steps):
        """Returns a manager of a folder with these steps."""
        self.write_steps(*steps)
        return self.open()

    def step_folder(self, step):
        """Returns the folder of a step."""
        return self.checkpoints / str(step)

    def names(self):
        """Returns the names in checkpoints/."""
        return sorted(path.name for path in self.checkpoints.iterdir())
