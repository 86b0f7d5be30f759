"""A run whose batches grow and whose weights change, across every boundary."""

import dataclasses
import shutil

import jax
import numpy as np

from glm5_jax.training import loop
from glm5_jax.training.reporting import metrics
from tests import environment, runs, small_configs

TOKENS = 4 * 24  # of a batch of the first phase
BATCH_TOKENS = [TOKENS, TOKENS, TOKENS, 2 * TOKENS, 2 * TOKENS]
NAMES = (
    *("train/loss", "data/tokens", "data/batch_tokens", "optim/learning_rate"),
    *("optim/mtp_weight", "optim/router_bias_rate"),
)


class GrowthTest(runs.OneDeviceTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        small_configs.write_corpus(cls.root / "corpus")
        config = small_configs.text_run(
            cls.root / "corpus",
            cls.root / "cache",
            num_steps=5,
            checkpoint_every=1,
            checkpoints_to_keep=9,
            eval_every=0,
            sample_tokens=0,
        )
        cls.config = dataclasses.replace(
            config,
            # Two batch sizes are two programs: MTP's layer alone has experts.
            model=dataclasses.replace(
                config.model,
                first_k_dense_replace=1,
                num_nextn_predict_layers=1,
                mtp_num_steps=1,
                attention="dense",
            ),
            data=dataclasses.replace(
                config.data, batch_warmup_sizes=(4,), batch_warmup_tokens=3.0 * TOKENS
            ),
            loss=dataclasses.replace(
                config.loss,
                mtp_weight_changes=((2.0 * TOKENS, 0.1),),
                router_bias_rate_changes=((5.0 * TOKENS, 0.0),),
            ),
            optim=dataclasses.replace(
                config.optim, name="adamw", warmup_tokens=TOKENS / 2
            ),
        )
        cls.enterClassContext(runs.compile_once(cls.config))
        cls.workdir = cls.root / "run"
        loop.train(cls.config, cls.workdir)

    def values(self, workdir):
        records = metrics.read(workdir / "metrics.jsonl")
        return {name: [r[name] for r in records] for name in NAMES}

    def test_it_logs_what_every_step_had(self):
        seen = self.values(self.workdir)
        self.assertEqual(seen["data/batch_tokens"], BATCH_TOKENS)
        self.assertEqual(seen["data/tokens"], np.cumsum(BATCH_TOKENS).tolist())
        np.testing.assert_allclose(seen["optim/mtp_weight"], [0.3, 0.3, 0.1, 0.1, 0.1])
        rates = seen["optim/router_bias_rate"]
        np.testing.assert_allclose(rates, [1e-3, 1e-3, 1e-3, 1e-3, 0])
        before = np.cumsum([0, *BATCH_TOKENS])
        x = (before[:-1] - TOKENS / 2) / (before[-1] - TOKENS / 2)
        want = 1e-3 + 9e-3 * (1 + np.cos(np.pi * x)) / 2
        want[0] = 0
        np.testing.assert_allclose(seen["optim/learning_rate"], want, rtol=1e-5)

    def test_resumed_before_every_boundary_it_ends_bit_for_bit_alike(self):
        """Before step 3 (weight of MTP), 4 (rows) and 5 (rate of the bias)."""
        for step in (2, 3, 4):
            folder = self.root / f"from_{step}"
            shutil.copytree(self.workdir, folder)
            (folder / "summary.json").unlink()
            for later in range(step + 1, self.config.num_steps + 1):
                shutil.rmtree(folder / "checkpoints" / str(later))
            loop.train(self.config, folder)
            self.assertEqual(self.values(folder), self.values(self.workdir))
            ended = [
                runs.params_of(run, self.config.model) for run in (folder, self.workdir)
            ]
            jax.tree.map(np.testing.assert_array_equal, *ended)


if __name__ == "__main__":
    environment.main()
