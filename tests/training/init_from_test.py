"""A run that starts from a folder on several devices: each reads its part alone."""

import dataclasses
import math
from unittest import mock

import jax
import numpy as np
from absl.testing import parameterized

from glm5_jax import command_line, sharding
from glm5_jax import config as config_lib
from glm5_jax.checkpoint import manager
from glm5_jax.model import transformer
from glm5_jax.training.run import folder as folder_lib
from glm5_jax.training.run import state as run_lib
from glm5_jax.weights import huggingface_export
from tests import environment, runs, small_configs
from tests.model import tiny

AXES = {"data": 2, "fsdp": 2, "expert": 2}
MODEL = dataclasses.replace(small_configs.TEXT_MODEL, kv_lora_rank=16)


class InitFromTest(runs.FolderTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        small_configs.write_corpus(cls.root / "corpus")
        params = tiny.params(MODEL)
        cls.params = jax.device_get(params)
        huggingface_export.save_params(cls.params, MODEL, cls.root / "huggingface")
        checkpoints = manager.CheckpointManager(cls.root / "run", keep=1)
        checkpoints.save(3, {"params": params, "opt_state": {}}, {})
        checkpoints.close()
        config = config_lib.TrainConfig(model=MODEL)
        settings = command_line.to_json_dict(config)
        folder_lib.write_json(cls.root / "run" / "config.json", settings)

    def started(self, name):
        """Starts a run from a folder, but for the step's compilation."""
        config = small_configs.text_run(
            self.root / "corpus",
            self.root / "cache",
            init_from=str(self.root / name),
            model=MODEL,
            mesh=config_lib.MeshConfig(**AXES),
            optim=config_lib.OptimConfig(name="adamw"),
        )
        workdir = self.root / f"from_{name}"
        workdir.mkdir()
        with mock.patch.object(run_lib.Run, "compile"):
            run = run_lib.start(config, workdir, runs.first_devices(**AXES))
        self.addCleanup(run.checkpoints.close)
        return run

    @parameterized.parameters("run", "huggingface")
    def test_each_device_has_its_part(self, name):
        run = self.started(name)
        places = sharding.specs(transformer.param_dims(MODEL))
        num_parts = []

        def check(found, wanted, place):
            axes = jax.tree.leaves([*place])  # names, and tuples of them
            number = math.prod(AXES.get(axis, 1) for axis in axes)
            self.assertLen({str(s.index) for s in found.addressable_shards}, number)
            self.assertLen(found.addressable_shards, 8)
            for shard in found.addressable_shards:
                np.testing.assert_array_equal(shard.data, wanted[shard.index])
                self.assertEqual(shard.data.size * number, wanted.size)
            num_parts.append(number)

        jax.tree.map(check, run.params, self.params, places)
        self.assertGreater(num_parts.count(4), 10)
        experts = run.params["layers_0"]["block_0"]["mlp"]["experts"]["gate_proj"]
        _, experts_of_all, width, _ = experts.shape
        part = experts.addressable_shards[0].data.shape
        self.assertEqual(part[1:3], (experts_of_all // 2, width // 2))
        leaves = jax.tree.leaves(run.opt_state)
        moments = [x for x in leaves if x.shape == experts.shape]
        self.assertLen(moments, 2 * 2)  # of gate_proj and up_proj
        for moment in moments:
            self.assertEqual(moment.sharding, experts.sharding)


if __name__ == "__main__":
    environment.main()
