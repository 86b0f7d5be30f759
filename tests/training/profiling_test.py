"""A profile holds the steps that were asked for, where xprof looks for it.

The profiler runs in a process of its own: where libtpu has compiled ahead of time, it
ends the process with a segmentation fault.
"""

import dataclasses
import multiprocessing
import pathlib

import jax
import jax.numpy as jnp
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import presets
from glm5_jax.training.reporting import profiling
from tests import environment


def record(folder):
    """Six steps, of which the third and the fourth are profiled."""
    environment.configure()
    profiler = profiling.Profiler((3, 4), folder)
    double = jax.jit(lambda x: x * 2)
    x = jnp.ones(8)
    for step in range(1, 7):
        name = f"number_{step}"
        with profiler.step(step), jax.profiler.TraceAnnotation(name):
            x = double(x)
        profiler.end_step(step, x)
    profiler.close()  # it has ended: this does nothing


class ProfilerTest(parameterized.TestCase):
    def test_the_steps_and_no_others(self):
        folder = pathlib.Path(self.create_tempdir().full_path) / "profile"
        processes = multiprocessing.get_context("spawn")
        child = processes.Process(target=record, args=(folder,))
        child.start()
        child.join()
        self.assertEqual(child.exitcode, 0)
        (file,) = (folder / "plugins" / "profile").rglob("*.xplane.pb")
        content = file.read_bytes()
        found = [step for step in range(1, 7) if f"number_{step}".encode() in content]
        self.assertEqual(found, [3, 4])
        self.assertIn(b"step_num", content)

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
