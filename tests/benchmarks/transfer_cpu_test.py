"""The experiment with jax's transfer server: what it refuses, and its watchdog."""

import pathlib
import sys
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest

from tests import environment

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import transfer_cpu


class Connection:
    """Stands for one whose peer never awaits uuid 0."""

    def __init__(self):
        self.poisoned = threading.Event()
        self._poison_connection = self.poisoned.set

    def pull(self, uuid, like):
        if not uuid and self.poisoned.wait(20):
            raise jax.errors.JaxRuntimeError("poisoned")
        return like


class TransferTest(absltest.TestCase):
    def test_the_layout_differs_where_jax_sees_no_difference(self):
        params = {"w": jnp.ones((2, 3), jnp.float32)}
        others = [
            {"v": jnp.ones((2, 3), jnp.float32)},
            {"w": jnp.ones((3, 2), jnp.float32)},
            {"w": jnp.ones((2, 3), jnp.int32)},
        ]
        for other in others:
            self.assertNotEqual(
                transfer_cpu.layout(params), transfer_cpu.layout(other), other
            )
        like = jax.eval_shape(lambda: params)["w"].update(sharding=params["w"].sharding)
        self.assertEqual(transfer_cpu.layout(params), transfer_cpu.layout({"w": like}))

    def test_the_digest_sees_one_changed_value(self):
        values = np.zeros((4, 5), jnp.bfloat16)
        changed = values.copy()
        changed[3, 4] = 1
        self.assertNotEqual(
            transfer_cpu.digest({"w": values}), transfer_cpu.digest({"w": changed})
        )

    def test_the_watchdog_ends_a_pull_that_hangs_and_no_other(self):
        hangs, works = Connection(), Connection()
        with self.assertRaises(jax.errors.JaxRuntimeError):
            transfer_cpu.pull(hangs, 0, {}, limit=0.05)
        before = set(threading.enumerate())
        self.assertEqual(transfer_cpu.pull(works, 1, {}, limit=1000.0), {})
        for thread in set(threading.enumerate()) - before:
            if isinstance(thread, threading.Timer):
                thread.join(20)
                self.assertFalse(thread.is_alive())
        self.assertFalse(works.poisoned.is_set())

    def test_a_jax_without_it_is_told_in_one_line(self):
        with (
            mock.patch.object(transfer_cpu, "transfer", None),
            self.assertRaisesRegex(SystemExit, "has no jax.experimental.transfer"),
        ):
            transfer_cpu.start_server(1)


if __name__ == "__main__":
    environment.main()
