"""Arguments by kind, and replicas among them."""

import dataclasses
import functools

import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import mesh as mesh_lib
from glm5_jax import presets
from glm5_jax.scale import inputs, programs
from glm5_jax.training.reporting import accounting
from tests import environment, runs

CONFIG = config_lib.TrainConfig(
    model=presets.GLM5_1M,
    data=config_lib.DataConfig(sequence_length=128, batch_size=8),
    mesh=config_lib.MeshConfig(fsdp=4, expert=2),
)


@functools.cache
def arrays(config=CONFIG):
    job = programs.make(config, mesh_lib.make_mesh(config.mesh))
    return inputs.arguments(job.arguments, job.names)


class ArgumentsTest(parameterized.TestCase):
    def test_on_one_device_they_are_the_state(self):
        config = dataclasses.replace(CONFIG, mesh=config_lib.MeshConfig())
        job = programs.make(config, runs.first_devices())
        kinds = inputs.by_kind(inputs.arguments(job.arguments, job.names))
        counts = accounting.count_parameters(config.model)
        experts = 4 * counts["routed experts"]
        mtp = 4 * 8 * 3 * 96 * 32  # the experts of MTP's block, counted under mtp
        self.assertEqual(kinds["parameters: experts"], experts + mtp)
        params = sum(v for k, v in kinds.items() if k.startswith("parameters"))
        self.assertEqual(params, accounting.state_bytes(config)["parameters"])
        self.assertEqual(
            kinds["optimizer moments"],
            accounting.state_bytes(config)["optimizer state"],
        )
        self.assertEqual(kinds["batch"], 5 * 4 * 8 * 128)

    def test_a_device_holds_its_part_and_copies_are_counted(self):
        found = {a.name: a for a in arrays()}
        for a in found.values():
            whole = np.prod(a.shape, dtype=int) * np.dtype(a.dtype).itemsize
            self.assertEqual(a.device_bytes * 8, whole * a.num_copies, a.name)
        self.assertEqual(found["batch.tokens"].num_copies, 1)
        self.assertEqual(found["opt_state.num_updates"].num_copies, 8)
        names = [a.name for a in inputs.replicated(arrays())]
        self.assertIn("opt_state.num_updates", names)
        self.assertNotIn("batch.tokens", names)
        self.assertEmpty(inputs.replicated(arrays(), least_bytes=2**30))


if __name__ == "__main__":
    environment.main()
