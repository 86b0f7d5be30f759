"""A policy that stays near another one and random: its loss, runs and replays."""

import dataclasses
import shutil
from unittest import mock

import jax
import numpy as np
from absl.testing import absltest

from glm5_jax import config as config_lib
from glm5_jax import environments, losses
from glm5_jax.checkpoint import manager
from glm5_jax.model import transformer
from glm5_jax.training import loop, pinned, policy, reference, replay
from glm5_jax.training import program as program_lib
from glm5_jax.training.reporting import metrics
from glm5_jax.training.run import folder as run_folder
from glm5_jax.training.run import preflight
from tests import environment, runs
from tests.training import rl_runs

KL_WEIGHT, ENTROPY_WEIGHT = 0.5, 0.01
ROUNDING = 1e-6  # of a log-probability, between two programs in float32


class ReferenceTest(runs.OneDeviceTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.start = cls.root / "start"
        plain = rl_runs.make_config(
            model=rl_runs.DENSE, num_steps=2, checkpoint_every=1
        )
        run_folder.claim(cls.start, plain)
        checkpoints = manager.CheckpointManager(cls.start, 1)
        params = jax.device_put(rl_runs.initial_params(plain))
        checkpoints.save(1, {"params": params}, {})
        checkpoints.close()
        terms = {"kl_weight": KL_WEIGHT, "entropy_weight": ENTROPY_WEIGHT}
        rl = dataclasses.replace(plain.rl, **terms)
        cls.config = dataclasses.replace(plain, rl=rl, init_from=str(cls.start))
        cls.enterClassContext(runs.compile_once(cls.config))
        make = mock.patch.object(environments, "make", return_value=rl_runs.Lottery())
        cls.enterClassContext(make)
        cls.run_folder = cls.root / "run"
        loop.train(cls.config, cls.run_folder)

    def test_the_policy_leaves_its_start_and_is_told_how_far(self):
        lines = metrics.read(self.run_folder / "metrics.jsonl")
        kls = [line["rl/reference_kl"] for line in lines]
        self.assertLess(abs(kls[0]), ROUNDING)
        self.assertGreater(kls[1], 1e-4)
        for line in lines:  # of a model that knows nothing
            self.assertBetween(line["rl/exact_entropy"], 0.8 * np.log(292), np.log(292))
            self.assertAlmostEqual(
                line["rl/exact_entropy"], line["rl/entropy"], delta=0.5
            )

    def test_a_replay_reads_the_reference_too(self):
        self.assertTrue(replay.replay(self.run_folder).is_same)

    def test_it_adds_its_terms_to_the_loss_of_sampled_tokens(self):
        program = program_lib.make_program(self.config, runs.first_devices())
        batch = self.batch()
        with jax.set_mesh(program.mesh):
            filled = reference.make(self.config, program, {})(batch)
        params = runs.params_of(self.run_folder, self.config.model)
        mask = batch["loss_mask"] > 0

        @jax.jit
        def parts(params, batch):
            wanted = policy.token_logprobs(params, self.config, batch)
            out = transformer.forward(
                params,
                self.config.model,
                *(batch[k] for k in ("tokens", "segment_ids", "positions")),
            )
            return wanted, losses.token_entropies(
                out.hidden, params["lm_head"], chunk_tokens=64
            )

        theirs = rl_runs.initial_params(self.config)
        np.testing.assert_allclose(
            np.where(mask, filled[policy.REFERENCE] - parts(theirs, batch)[0], 0),
            0,
            atol=ROUNDING,
        )

        @jax.jit  # one program: two round log-probabilities differently
        def both(params, filled):
            found, _ = policy.value_and_grad(params, self.config, filled)
            return found, parts(params, filled)

        (loss, found), (ours, entropies) = jax.device_get(both(params, filled))
        away = filled[policy.REFERENCE] - ours
        kl = np.where(mask, np.exp(away) - 1 - away, 0)
        entropy = np.where(mask, entropies, 0)
        # Without advantages the objective is zero.
        terms = KL_WEIGHT * kl - ENTROPY_WEIGHT * entropy
        self.assertAlmostEqual(loss, np.sum(batch["weights"] * terms), places=5)
        count = mask.sum()
        self.assertAlmostEqual(found["rl/reference_kl"], kl.sum() / count, places=5)
        self.assertAlmostEqual(
            found["rl/exact_entropy"], entropy.sum() / count, places=4
        )

    def test_a_resumed_run_reads_the_step_that_it_began_with(self):
        start, run = self.root / "goes_on", self.root / "resumed"
        shutil.copytree(self.start, start)
        config = dataclasses.replace(self.config, init_from=str(start), num_steps=1)
        loop.train(config, run)
        checkpoints = manager.CheckpointManager(start, 1)  # which keeps the newest
        other = rl_runs.initial_params(dataclasses.replace(config, seed=7))
        checkpoints.save(2, {"params": jax.device_put(other)}, {})
        longer = dataclasses.replace(config, num_steps=2)
        checkpoints.close()
        with self.assertRaisesRegex(
            config_lib.InputError, "init_from: .*began with step 1 of .*goes_on"
        ):
            loop.train(longer, run)
        with self.assertRaisesRegex(config_lib.InputError, "began with step 1 of"):
            preflight.check(longer, str(run))
        with self.assertRaisesRegex(config_lib.InputError, "goes_on/checkpoints/1"):
            replay.replay(run)
        kept = self.start / "checkpoints" / "1"
        shutil.copytree(kept, start / "checkpoints" / "1")
        loop.train(longer, run)
        for name in ("rl/reference_kl", "train/loss"):
            here, there = (
                metrics.read(folder / "metrics.jsonl")[1][name]
                for folder in (run, self.run_folder)
            )
            self.assertEqual(here, there)
        self.assertTrue(replay.replay(run).is_same)

    def test_the_step_of_a_run_in_any_folder_is_pinned(self):
        start = self.root / "checkpoints" / "start"
        shutil.copytree(self.start, start)
        for path, pinned_steps in (
            (start, {str(start): 1}),
            (start / "checkpoints" / "1", {}),
        ):
            config = dataclasses.replace(self.config, init_from=str(path))
            self.assertEqual(pinned.resolve(config, None), pinned_steps)

    def test_a_mesh_gives_the_step_what_it_takes(self):
        mesh = runs.first_devices(fsdp=2)
        program = program_lib.make_program(self.config, mesh)
        with jax.set_mesh(mesh):
            batch = jax.device_put(self.batch(), program_lib.batch_place(mesh))
            found = reference.make(self.config, program, {})(batch)[policy.REFERENCE]
        self.assertEqual(found.sharding, program.batch[policy.REFERENCE].sharding)

    def batch(self):
        """Rows of sampled tokens whose advantages are zero."""
        rng, shapes = np.random.default_rng(0), program_lib.batch_shapes(self.config)
        batch = {k: np.zeros(x.shape, x.dtype) for k, x in shapes.items()}
        shape = batch["tokens"].shape
        for name in ("tokens", "targets"):
            batch[name] = rng.integers(0, 292, shape, np.int32)
        batch["segment_ids"] += 1
        batch["positions"] += np.arange(shape[1], dtype=np.int32)
        batch["loss_mask"] = (rng.random(shape) < 0.5).astype(np.float32)
        batch["weights"] = batch["loss_mask"] * rng.random(shape, np.float32)
        return batch


class RefusedTest(absltest.TestCase):
    def test_there_must_be_a_reference(self):
        with self.assertRaisesRegex(config_lib.InputError, "init_from or rl.reference"):
            rl_runs.make_config({"kl_weight": 0.1})
        for name in ("kl_weight", "entropy_weight"):
            with self.assertRaisesRegex(config_lib.InputError, f"{name} must be >= 0"):
                rl_runs.make_config({name: -0.1})

    def test_a_missing_folder_is_found_before_a_start(self):
        config = rl_runs.make_config({"kl_weight": 0.1, "reference": "/nowhere"})
        with self.assertRaisesRegex(config_lib.InputError, "rl.reference: .*/nowhere"):
            preflight.check(config)

    def test_without_a_weight_nothing_is_read(self):
        config = rl_runs.make_config({"reference": "/nowhere"})
        self.assertIsNone(config.reference)
        self.assertNotIn(policy.REFERENCE, program_lib.batch_shapes(config))


if __name__ == "__main__":
    environment.main()
