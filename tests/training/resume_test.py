"""A run that resumes with fewer devices: 8, then 4, then 1."""

import dataclasses

import numpy as np
import pytest

from glm5_jax.checkpoint import step_folder
from glm5_jax.training import loop
from glm5_jax.training.reporting import metrics
from tests import environment, runs, small_configs

# Float32 sums over devices in another order, for six steps (as in mesh_test.py).
LOSS_ATOL = 1e-4
MESHES = {2: {"fsdp": 8}, 4: {"fsdp": 2, "data": 2}, 6: {}}


class ResumeTest(runs.FolderTest):
    @pytest.mark.slow
    def test_from_8_devices_to_4_to_1(self):
        small_configs.write_corpus(self.root / "corpus")
        config = small_configs.text_run(self.root / "corpus", self.root / "cache")
        model = dataclasses.replace(config.model, kv_lora_rank=16)
        optim = dataclasses.replace(
            config.optim,
            schedule="constant",  # so that it does not depend on num_steps
            ns_dtype="float32",
            adam_eps=1e-4,
        )
        config = dataclasses.replace(
            config, model=model, optim=optim, sample_tokens=0, eval_every=0
        )
        with runs.use_devices():
            loop.train(config, self.root / "one")
        for last, axes in MESHES.items():
            with runs.use_devices(**axes):
                loop.train(
                    dataclasses.replace(config, num_steps=last), self.root / "fewer"
                )
            self.assertEqual(step_folder.find(self.root / "fewer").name, str(last))
        losses = [
            [r["train/loss"] for r in metrics.read(self.root / n / "metrics.jsonl")]
            for n in ("one", "fewer")
        ]
        self.assertLen(losses[1], config.num_steps)
        np.testing.assert_allclose(*losses, rtol=0, atol=LOSS_ATOL)


if __name__ == "__main__":
    environment.main()
