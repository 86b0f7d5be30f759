"""A profile holds the steps that were asked for, where xprof looks for it.

The profiler runs in a process of its own: where libtpu has compiled ahead of time, it
ends the process with a segmentation fault.
"""

import dataclasses
import os
import pathlib
import signal
import time
from unittest import mock

import jax
import jax.numpy as jnp
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import presets
from glm5_jax.training import loop
from glm5_jax.training.reporting import profiling
from tests import environment, forked, small_configs

CASES = (  # steps, those with a signal, and those of each profile
    ("named", (3, 4), (), [[3, 4]]),
    ("asked_for_before", (7, 8), (2,), [[2, 3, 4], [7, 8]]),
    ("asked_for_meanwhile", (5, 6), (6,), [[5, 6]]),
)


def record_all(root):
    """Records every case, one after the other."""
    environment.configure()
    for name, steps, asked_at, _ in CASES:
        record(root / name, steps, asked_at)


def record(folder, steps, asked_at):
    """Nine steps, of which some are profiled."""
    profiler = profiling.Profiler(steps, folder)
    double = jax.jit(lambda x: x * 2)
    x = jnp.ones(8)
    for step in range(1, 10):
        if step == 6 and steps == (7, 8):
            time.sleep(1)  # a profile's folder is named by the second
        if step in asked_at:
            os.kill(os.getpid(), signal.SIGUSR2)
        name = f"number_{step}"
        with profiler.step(step), jax.profiler.TraceAnnotation(name):
            x = double(x)
        profiler.end_step(step, x)
    profiler.close()  # the profiles have ended
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


class ProfilerTest(parameterized.TestCase):
    def test_the_steps_and_no_others(self):
        root = pathlib.Path(self.create_tempdir().full_path)
        child = forked.PROCESSES.Process(target=record_all, args=(root,))
        child.start()
        child.join()
        self.assertEqual(child.exitcode, 0)
        for name, _, _, wanted in CASES:
            with self.subTest(name):
                self.assert_has(root / name, wanted)

    def assert_has(self, folder, wanted):
        files = sorted((folder / "plugins" / "profile").rglob("*.xplane.pb"))
        contents = [file.read_bytes() for file in files]
        found = [
            [step for step in range(1, 10) if f"number_{step}".encode() in content]
            for content in contents
        ]
        self.assertEqual(found, wanted)
        self.assertIn(b"step_num", contents[0])

    def test_a_run_hears_the_signal_before_it_compiles(self):
        """Until somebody hears it, it ends a process."""
        folder = pathlib.Path(self.create_tempdir().full_path)
        heard = lambda *args: {"by": signal.getsignal(signal.SIGUSR2)}
        with mock.patch.object(loop, "_train", heard):
            found = loop.train(small_configs.text_run(folder, folder), folder)
        self.assertNotIn(found["by"], (signal.SIG_DFL, signal.SIG_IGN))
        self.assertEqual(signal.getsignal(signal.SIGUSR2), signal.SIG_DFL)

    def test_none_where_none_is_asked_for(self):
        folder = pathlib.Path(self.create_tempdir().full_path) / "profile"
        profiler = profiling.Profiler((), folder)
        with profiler.step(1):
            pass
        profiler.end_step(1, None)
        profiler.close()
        self.assertFalse(folder.exists())

    @parameterized.parameters(((3,),), ((4, 3),), ((0, 2),), ((3, 101),))
    def test_steps_that_are_not_there_are_refused(self, steps):
        config = config_lib.TrainConfig(model=presets.GLM5_1M, profile_steps=(2, 100))
        with self.assertRaisesRegex(config_lib.InputError, r"1\.\.100 .num_steps"):
            dataclasses.replace(config, profile_steps=steps)


if __name__ == "__main__":
    environment.main()
