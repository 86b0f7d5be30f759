"""Distillation from other policies: its advantages, the choice of a teacher, runs."""

import dataclasses
from unittest import mock

import jax
import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import environments
from glm5_jax.checkpoint import manager
from glm5_jax.environments import mixture
from glm5_jax.rl import episode_files
from glm5_jax.training import loop, policy, replay, teachers
from glm5_jax.training import program as program_lib
from glm5_jax.training.reporting import metrics
from glm5_jax.training.run import folder as run_folder
from glm5_jax.training.run import preflight
from tests import environment, runs
from tests.rl import lottery
from tests.training import rl_runs

ROUNDING = 1e-5  # of a log-probability, between two programs in float32
RL = {
    "prompts_per_step": 16,
    "group_size": 1,
    "environment": "reverse_dense:2-3+reverse_dense:4-5",
    "max_new_tokens": 8,
    "slots": 16,
}
NUM_STEPS, FIRST_SAVED = 16, 12
# Distances to the teachers are then large against the noise of few answers.
FAR = {"initializer_range": 0.3}


def as_stage(config, stage, **rl):
    return dataclasses.replace(
        config, stage=stage, rl=dataclasses.replace(config.rl, **rl)
    )


class TeachersTest(runs.OneDeviceTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        plain = rl_runs.make_config(
            model=rl_runs.DENSE | FAR,
            num_steps=NUM_STEPS,
            checkpoint_every=FIRST_SAVED,
        )
        optim = dataclasses.replace(
            plain.optim, learning_rate=0.1, end_learning_rate=0.1
        )
        plain = dataclasses.replace(plain, optim=optim)
        cls.teachers = []
        for seed in (7, 8):
            folder = cls.root / f"teacher_{seed}"
            run_folder.claim(folder, plain)
            params = rl_runs.initial_params(dataclasses.replace(plain, seed=seed))
            checkpoints = manager.CheckpointManager(folder, 1)
            checkpoints.save(1, {"params": jax.device_put(params)}, {})
            checkpoints.close()
            cls.teachers.append((str(folder), params))
        names = tuple(name for name, _ in cls.teachers)
        cls.config = as_stage(plain, "distill", teachers=names, **RL)
        cls.program = program_lib.make_program(cls.config, runs.first_devices())

    def batch(self):
        """Rows of two sampled texts each, whose tokens have either teacher."""
        rng, shapes = np.random.default_rng(0), program_lib.batch_shapes(self.config)
        batch = {k: np.zeros(x.shape, x.dtype) for k, x in shapes.items()}
        shape = batch["tokens"].shape
        for name in ("tokens", "targets"):
            batch[name] = rng.integers(0, 292, shape, np.int32)
        batch["segment_ids"] += 1
        batch["positions"] += np.arange(shape[1], dtype=np.int32)
        batch["loss_mask"] = (rng.random(shape) < 0.5).astype(np.float32)
        batch["weights"] = batch["loss_mask"] * rng.random(shape, np.float32)
        batch[policy.TAUGHT_BY] = rng.integers(0, 2, shape, np.int32)
        return batch

    def test_each_token_has_its_teacher_whose_advantage_is_that_of_the_formula(self):
        batch = self.batch()
        with jax.set_mesh(self.program.mesh):
            filled = dict(teachers.make(self.config, self.program, {})(batch))
        own = rl_runs.initial_params(self.config)
        score = jax.jit(policy.token_logprobs, static_argnums=1)
        first, second, ours = (
            np.asarray(score(params, self.config, batch), np.float64)
            for params in (*(params for _, params in self.teachers), own)
        )
        wanted = np.where(batch[policy.TAUGHT_BY] == 1, second, first)
        mask = batch["loss_mask"] > 0
        found = np.where(mask, filled[policy.TEACHER] - wanted, 0)
        np.testing.assert_allclose(found, 0, atol=ROUNDING)
        self.assertGreater(np.abs(first - second)[mask].max(), 1)
        # Stage rl, given the formula's advantages, computes the same.
        filled["rollout_logprobs"] = np.asarray(ours, np.float32)
        given = filled | {"advantages": (wanted - ours).astype(np.float32)}
        grad = jax.jit(policy.value_and_grad, static_argnums=1)
        (loss, seen), grads = grad(own, self.config, filled)
        rl = as_stage(self.config, "rl", teachers=(), group_size=2, prompts_per_step=8)
        (same, _), same_grads = grad(own, rl, given)
        self.assertAlmostEqual(loss, same, places=4)
        kl = (ours - wanted)[mask].mean()
        self.assertAlmostEqual(seen["rl/teacher_kl"], kl, places=4)
        for a, b in zip(*map(jax.tree.leaves, (grads, same_grads)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4)

    def test_a_run_comes_nearer_to_its_teachers_and_is_replayed(self):
        parts = mixture.Mixture("a+b", lambda name: lottery.Lottery())
        make = mock.patch.object(environments, "make", return_value=parts)
        with make, runs.compile_once(self.config):
            loop.train(self.config, self.root / "run")
            for step in range(1, FIRST_SAVED + 1):  # so that it begins there
                episode_files.path_of(self.root / "run", step).unlink()
            self.assertTrue(replay.replay(self.root / "run").is_same)
        lines = metrics.read(self.root / "run" / "metrics.jsonl")
        kls = [line["rl/teacher_kl"] for line in lines]
        self.assertLess(np.mean(kls[-6:]), 0.8 * kls[0])  # it rises before it falls
        used = [line["rollout/used_groups"] for line in lines]
        self.assertEqual(used, [RL["prompts_per_step"]] * NUM_STEPS)


class RefusedTest(parameterized.TestCase):
    @parameterized.parameters(
        ("rl", ("a",), "rl.teachers must be empty in stage 'rl'"),
        ("async_rl", ("a",), "rl.teachers must be empty in stage 'async_rl'"),
        ("distill", (), "group_size must be at least 2"),
        ("distill", ("a", "b", "c"), "each of the 2 parts of .* got 3"),
    )
    def test_a_stage_and_its_teachers(self, stage, names, message):
        with self.assertRaisesRegex(config_lib.InputError, message):
            rl_runs.make_config(RL | {"teachers": names}, stage=stage)

    @parameterized.parameters(
        ({"critic": True}, "critic must be false with teachers"),
        ({"dynamic_sampling": True}, "dynamic_sampling must be false with"),
    )
    def test_what_else_would_give_advantages(self, rl, message):
        with self.assertRaisesRegex(config_lib.InputError, message):
            rl_runs.make_config(RL | {"teachers": ("a",)} | rl, stage="distill")

    def test_a_missing_folder_is_found_before_a_start(self):
        config = rl_runs.make_config(RL | {"teachers": ("/nowhere",)}, stage="distill")
        with self.assertRaisesRegex(config_lib.InputError, "rl.teachers: .*/nowhere"):
            preflight.check(config)

    def test_copies_of_weights_are_counted(self):
        config = rl_runs.make_config(
            RL | {"teachers": ("a", "b"), "kl_weight": 0.1, "reference": "c"},
            stage="distill",
        )
        self.assertEqual(config.num_other_policies, 3)


if __name__ == "__main__":
    environment.main()
