"""A critic: its values and updates, and a run that learns from single rollouts."""

import dataclasses
import functools
import shutil
from unittest import mock

import jax
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from glm5_jax import config as config_lib
from glm5_jax import environments
from glm5_jax.checkpoint import manager
from glm5_jax.environments import protocol
from glm5_jax.model import transformer
from glm5_jax.rl import episode_files, gateway
from glm5_jax.training import critic as critic_lib
from glm5_jax.training import loop, policy, replay
from glm5_jax.training import program as program_lib
from glm5_jax.training.feeds import policy_batch
from glm5_jax.training.feeds import rollouts as rl_lib
from glm5_jax.training.reporting import metrics
from glm5_jax.training.run import health as health_lib
from tests import environment, runs
from tests.rl import trajectories_test
from tests.training import rl_runs

ROWS, LENGTH, WARMUP, GAMMA = 8, rl_runs.LENGTH, 2, 0.99
ORDER_ATOL = 1e-5  # of sums in float32 in another order; of large ones, a part
RL = {
    "critic": True,
    "critic_learning_rate": 1e-2,
    "critic_warmup_steps": WARMUP,
    "gae_gamma": GAMMA,
    "prompts_per_step": ROWS,
    "group_size": 1,
    "objective": "dis",
    "loss_mean": "token",
}
CONFIG = rl_runs.make_config(RL, rl_runs.DENSE)
LOWER, INITIAL = program_lib.Program.lower, program_lib.Program.initial
SKIPPED = {"max_skipped_in_a_row": 1, "on_not_finite": "roll_back"}


def make_batch(seed=0, config=CONFIG):
    """Rows of answers and observations, whose reward is at the last sampled token.

    It is 1 in the rows of the ids 11 to 18, and 0 in those of the ids 3 to 10.
    """
    rng, shapes = np.random.default_rng(seed), program_lib.batch_shapes(config)
    batch = {k: np.zeros(x.shape, x.dtype) for k, x in shapes.items()}
    kinds = rng.permutation(ROWS) % 2
    batch["tokens"] = rng.integers(3, 11, (ROWS, LENGTH), np.int32)
    batch["tokens"] += 8 * kinds[:, None].astype(np.int32)
    for row, length in enumerate(rng.integers(12, LENGTH, ROWS)):
        batch["segment_ids"][row, :length] = 1
        batch["positions"][row, :length] = np.arange(length)
        mask = rng.random(length) < 0.7
        mask[[0, length - 1]] = False, True
        batch["loss_mask"][row, :length] = mask
        batch[policy.REWARDS][row, length - 1] = kinds[row]
        batch[policy.LAMBDAS][row] = 1 - 1 / (1.5 * mask.sum())
    batch["weights"] = batch["loss_mask"] / batch["loss_mask"].sum()
    return batch


@functools.cache
def made():
    """The program of a run and its critic, whose programs all tests share."""
    program = program_lib.make_program(CONFIG, runs.first_devices())
    return program, critic_lib.make(CONFIG, program)


def first_state(critic, config=CONFIG):
    return critic.init(jax.device_put(rl_runs.initial_params(config)))


def with_a_head(state):
    """The state with a value head that is not zero."""
    params = dict(jax.device_get(state[critic_lib.NAME]["params"]))
    head = params[critic_lib.HEAD]
    params[critic_lib.HEAD] = np.linspace(-1, 1, head.size, dtype=np.float32)
    return params


class StepTest(runs.OneDeviceTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.program, cls.critic = made()
        cls.enterClassContext(jax.set_mesh(cls.program.mesh))

    def step(self, state, batch):
        """Calls the critic's step with a batch placed as a run's."""
        place = program_lib.batch_place(self.program.mesh)
        return self.critic.step(state, jax.device_put(batch, place))

    def placed(self, params):
        """Places the critic's parameters as a run does."""
        shapes = self.critic.state[critic_lib.NAME]["params"]
        return jax.device_put(params, program_lib.places(shapes))

    def test_it_begins_with_the_policys_weights_and_the_value_zero(self):
        state, batch = first_state(self.critic), make_batch()
        policys = rl_runs.initial_params(CONFIG)
        params = dict(state[critic_lib.NAME]["params"])
        self.assertEqual(np.abs(params.pop(critic_lib.HEAD)).max(), 0)
        self.assertSameElements(params, set(policys) - {"lm_head"})
        jax.tree.map(
            np.testing.assert_array_equal, params, {k: policys[k] for k in params}
        )
        _, filled, found = self.step(state, batch)
        returns = np.zeros((ROWS, LENGTH))
        for row in range(ROWS):
            (places,) = np.nonzero(batch["loss_mask"][row])
            reward = batch[policy.REWARDS][row].sum()
            returns[row, places] = reward * GAMMA ** np.arange(len(places))[::-1]
        count = batch["loss_mask"].sum()
        self.assertAlmostEqual(found["critic/return"], returns.sum() / count, places=5)
        self.assertEqual(found["critic/value"], 0)
        wanted = np.sum(batch["weights"] * returns**2) / 2
        self.assertAlmostEqual(found["critic/loss"], wanted, places=6)
        self.assertEqual(found["critic/explained_variance"], 0)
        last = np.where(batch[policy.REWARDS] > 0)
        np.testing.assert_array_equal(np.asarray(filled["advantages"])[last], 1)

    def test_advantages_come_from_the_values_before_the_updates(self):
        batch, state = make_batch(), first_state(self.critic)
        params = with_a_head(state)
        out = jax.jit(transformer.forward, static_argnums=1)(
            params,
            CONFIG.model,
            *(batch[k] for k in ("tokens", "segment_ids", "positions")),
        )
        head = np.asarray(params[critic_lib.HEAD], np.float64)
        values = np.asarray(out.hidden, np.float64) @ head
        wanted = np.zeros((ROWS, LENGTH))
        for row in range(ROWS):
            (places,) = np.nonzero(batch["loss_mask"][row])
            after = value_after = 0.0
            for t in reversed(places):
                reward, lam = (
                    float(batch[name][row, t])
                    for name in (policy.REWARDS, policy.LAMBDAS)
                )
                delta = reward + GAMMA * value_after - values[row, t]
                wanted[row, t] = after = delta + GAMMA * lam * after
                value_after = values[row, t]
        state[critic_lib.NAME]["params"] = self.placed(params)
        _, filled, found = self.step(state, batch)
        np.testing.assert_allclose(
            filled["advantages"], wanted, rtol=0, atol=10 * ORDER_ATOL
        )
        mask = batch["loss_mask"] > 0
        self.assertAlmostEqual(found["critic/value"], values[mask].mean(), places=4)

    def test_it_learns_a_known_value_and_keeps_its_attention(self):
        """Of rows that it has not seen; what is left is the discount to the end."""
        state = first_state(self.critic)
        before = rl_runs.by_path(jax.device_get(state[critic_lib.NAME]["params"]))
        for seed in range(40):
            state, _, found = self.step(state, make_batch(seed))
        self.assertGreater(found["critic/explained_variance"], 0.9)
        after = rl_runs.by_path(jax.device_get(state[critic_lib.NAME]["params"]))
        for path, old in before.items():
            moved = np.abs(after[path] - old).max()
            is_kept = {"self_attn", "indexer"} & {*path}
            check = self.assertEqual if is_kept else self.assertGreater
            check(moved, 0, path)

    def test_experts_learn_and_what_chooses_does_not(self):
        labels = critic_lib.make_optimizer(rl_runs.make_config(RL)).labels
        kept = {"self_attn", "indexer", "e_score_correction_bias"}
        labels = rl_runs.by_path(labels)
        for path, label in labels.items():
            self.assertEqual(label == "frozen", bool(kept & {*path}), path)
        for name in ("experts", *kept):
            self.assertTrue(any(name in path for path in labels), name)

    def test_rows_of_padding_move_nothing(self):
        batch = {k: np.zeros_like(v) for k, v in make_batch().items()}
        state = first_state(self.critic)
        old = jax.device_get(state[critic_lib.NAME]["params"])
        state, filled, found = self.step(state, batch)
        jax.tree.map(
            np.testing.assert_array_equal, state[critic_lib.NAME]["params"], old
        )
        self.assertEqual(np.abs(filled["advantages"]).max(), 0)
        self.assertEqual(found["critic/skipped_total"], CONFIG.rl.critic_updates)

    def test_parts_one_after_the_other_do_not_matter(self):
        optim = dataclasses.replace(CONFIG.optim, accumulation_steps=4)
        parts = dataclasses.replace(CONFIG, optim=optim)
        params, batch = with_a_head(first_state(self.critic)), make_batch()
        batch[critic_lib.RETURNS] = batch[policy.REWARDS]
        step = jax.jit(critic_lib.value_and_grad, static_argnums=1)
        assert_close(*(step(params, config, batch) for config in (CONFIG, parts)))

    @pytest.mark.slow
    def test_a_mesh_does_not_matter(self):
        """It adds up the gradients of all parts, and cuts the critic as the policy."""
        batch, state = make_batch(), first_state(self.critic)
        params = with_a_head(state)
        state[critic_lib.NAME]["params"] = self.placed(params)
        _, wanted, told = self.step(state, batch)
        mesh = runs.first_devices(fsdp=2, context=2, tensor=2)
        program = program_lib.make_program(CONFIG, mesh)
        where = program_lib.batch_place(mesh)
        first = rl_runs.initial_params(CONFIG)
        with jax.set_mesh(mesh):
            critic = critic_lib.make(CONFIG, program)
            state = critic.init(
                jax.device_put(first, program_lib.places(program.params))
            )
            places = program_lib.places(critic.state[critic_lib.NAME]["params"])
            state[critic_lib.NAME]["params"] = jax.device_put(params, places)
            state, filled, found = critic.step(state, jax.device_put(batch, where))
        assert_close((filled["advantages"], found), (wanted["advantages"], told))
        self.assertEqual(filled["advantages"].sharding, where)
        cut = program_lib.places(state[critic_lib.NAME]["params"])
        self.assertEqual(cut, places)
        policys = program_lib.places(program.params)
        cut.pop(critic_lib.HEAD)
        self.assertEqual(cut, {name: policys[name] for name in cut})


def assert_close(got, wanted):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=ORDER_ATOL, atol=ORDER_ATOL),
        jax.device_get(got),
        jax.device_get(wanted),
    )


class RunTest(runs.OneDeviceTest):
    """Four steps: in the first two the critic learns alone."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.enterClassContext(runs.compile_once(CONFIG))
        program, critic = made()
        cls.enterClassContext(
            mock.patch.object(critic_lib, "make", return_value=critic)
        )
        make = mock.patch.object(environments, "make", return_value=rl_runs.Lottery())
        cls.enterClassContext(make)
        abstract = {"params": program.params, "opt_state": program.opt_state}
        cls.abstract = {**abstract, **critic.state}
        cls.run_folder = cls.root / "run"
        loop.train(CONFIG, cls.run_folder)

    def state_of(self, folder, step=4):
        path = folder / "checkpoints" / str(step)
        return jax.device_get(manager.read_state(path, self.abstract))

    def assert_same(self, folder, other):
        """Policy and critic, their moments and counts, bit for bit."""
        states = self.state_of(folder), self.state_of(other)
        jax.tree.map(np.testing.assert_array_equal, *states)

    def rolled_back(self, name):
        folder = self.root / name
        shutil.copytree(self.run_folder, folder)
        shutil.rmtree(folder / "checkpoints" / "4")
        (folder / "summary.json").unlink()
        return folder

    def test_the_policy_waits_for_the_critic(self):
        first = rl_runs.initial_params(CONFIG)
        waiting, learned = (self.state_of(self.run_folder, step) for step in (2, 4))
        jax.tree.map(np.testing.assert_array_equal, waiting["params"], first)
        moved = np.abs(learned["params"]["lm_head"] - first["lm_head"]).max()
        self.assertGreater(moved, 0)
        for state in (waiting, learned):
            head = state[critic_lib.NAME]["params"][critic_lib.HEAD]
            self.assertGreater(np.abs(head).max(), 0)
        lines = metrics.read(self.run_folder / "metrics.jsonl")
        skipped = [line["optim/skipped_total"] for line in lines]
        self.assertEqual(skipped, [1, 2, 2, 2])
        for line in lines:  # the gate works while the policy waits
            self.assertBetween(line[policy.GAP], 1e-9, CONFIG.rl.max_logprob_gap)
            self.assertEqual(line["rollout/used_groups"], ROWS)
            self.assertEqual(line["critic/skipped_total"], 0)

    def test_rows_have_the_reward_of_their_episode(self):
        kept = episode_files.read(self.run_folder, 1)
        groups = [[*group] for group in kept.groups]
        batch = policy_batch.make(CONFIG, groups, kept.position)
        returns = 0.0
        for row, (episode,) in enumerate(groups):
            (places,) = np.nonzero(batch["loss_mask"][row])
            wanted = np.zeros(LENGTH)
            wanted[places[-1]] = reward = episode.reward.total
            np.testing.assert_array_equal(batch[policy.REWARDS][row], wanted)
            lam = 1 - 1 / (1.5 * len(places))
            np.testing.assert_allclose(batch[policy.LAMBDAS][row, places], lam)
            returns += sum(reward * GAMMA**k for k in range(len(places)))
        (line, *_) = metrics.read(self.run_folder / "metrics.jsonl")
        count = batch["loss_mask"].sum()
        self.assertAlmostEqual(line["critic/return"], returns / count, places=5)

    def test_the_advantage_of_each_token_is_kept(self):
        """In step 1 all values are 0, so only the discounted reward is left."""
        kept = episode_files.read(self.run_folder, 1)
        self.assertLen(kept.advantages, ROWS)
        for (episode,) in kept.groups:
            (sample,) = episode.samples
            found, mask = kept.advantages[id(sample)], np.array(sample.mask)
            self.assertLen(found, len(sample.tokens))
            lam = 1 - 1 / (1.5 * mask.sum())
            powers = (GAMMA * lam) ** np.arange(mask.sum())[::-1]
            wanted = np.zeros(len(mask))
            wanted[mask] = episode.reward.total * powers
            np.testing.assert_allclose(found, wanted, rtol=0, atol=ORDER_ATOL)
        later = episode_files.read(self.run_folder, 4).advantages
        self.assertLen(later, ROWS)

    def test_a_resumed_run_ends_bit_for_bit_alike(self):
        folder = self.rolled_back("resumed")
        loop.train(CONFIG, folder)
        self.assert_same(folder, self.run_folder)
        lines = [rl_runs.computed(run) for run in (folder, self.run_folder)]
        self.assertEqual(*lines)

    @pytest.mark.slow
    def test_episodes_that_are_played_meanwhile(self):
        """Without staleness it is the same run; with it, groups wait for no step."""
        stale, same = (
            dataclasses.replace(
                CONFIG,
                stage="async_rl",
                rl=dataclasses.replace(CONFIG.rl, max_staleness=most),
            )
            for most in (2, 0)
        )
        folders = self.root / "stale", self.root / "same"
        slow = mock.Mock(return_value=rl_runs.Lottery(seconds=0.02))
        whole = program_lib.Program
        with (
            mock.patch.multiple(whole, lower=LOWER, initial=INITIAL),
            runs.compile_once(stale),
            mock.patch.object(environments, "make", slow),
        ):
            for config, folder in zip((stale, same), folders, strict=True):
                loop.train(config, folder)
        states = self.state_of(folders[1]), self.state_of(self.run_folder)
        assert_close(*states)  # the programs are not the same
        for folder in folders:
            for record in metrics.read(folder / "metrics.jsonl"):
                self.assertEqual(record["rollout/used_groups"], ROWS)
                self.assertEqual(record["critic/skipped_total"], 0)
                self.assertBetween(record[policy.GAP], 0, CONFIG.rl.max_logprob_gap)
        records = metrics.read(folders[0] / "metrics.jsonl")
        staleness = [r["rollout/staleness_max"] for r in records]
        self.assertBetween(max(staleness), 1, 2)

    def test_a_rollback_takes_the_critic_along(self):
        """Those of step 3 are NaN; a replay of the other steps ends alike."""
        health = dataclasses.replace(CONFIG.health, **SKIPPED)
        config = dataclasses.replace(CONFIG, health=health)
        plain = rl_lib.Rollouts.next

        def spoilt(feed, params, position):
            batch, seen = plain(feed, params, position)
            if position == 2:
                batch[policy.REWARDS] = np.full_like(batch[policy.REWARDS], np.nan)
            return batch, seen

        folder = self.rolled_back("nan")
        with mock.patch.object(rl_lib.Rollouts, "next", spoilt):
            loop.train(config, folder)
        *_, last = metrics.read(folder / "metrics.jsonl")
        self.assertEqual((last["step"], last[health_lib.ROLLBACKS]), (4, 1))
        self.assertEqual(last["critic/skipped_total"], 0)
        self.assertEqual(episode_files.read(folder, 4).position, 4)
        episode_files.path_of(folder, 1).unlink()  # so that it begins with step 2
        found = replay.replay(folder)
        self.assertEqual((found.first, found.last, found.is_same), (2, 4, True))

    def test_a_replay_has_a_critic_too(self):
        found = replay.replay(self.run_folder)
        self.assertEqual((found.first, found.last, found.is_same), (0, 4, True))

    def test_readers_of_the_policy_do_not_meet_it(self):
        params = runs.params_of(self.run_folder, CONFIG.model)
        wanted = self.state_of(self.run_folder)["params"]
        jax.tree.map(np.testing.assert_array_equal, params, wanted)


def make_episode(*masks):
    """An episode of a sample for each mask, whose tokens count on."""
    samples = [
        gateway.Sample(
            tokens=[*range(len(mask))],
            mask=[*map(bool, mask)],
            logprobs=[-0.5] * len(mask),
            versions=[0] * len(mask),
            cache_versions=[0] * len(mask),
        )
        for mask in masks
    ]
    task, reward = rl_runs.Lottery().task("train", 0, 0), protocol.Reward(0.75)
    return trajectories_test.episode(task=task, samples=samples, reward=reward)


class BatchTest(absltest.TestCase):
    def test_two_conversations_of_an_episode_each_end_with_its_reward(self):
        masks = [0, 1, 1, 0, 0, 1, 0], [0, 0, 0, 1, 1]
        episode = make_episode(*masks)
        rl = dataclasses.replace(
            CONFIG.rl, rows_per_step=2, prompts_per_step=1, min_used_groups=1.0
        )
        config = dataclasses.replace(CONFIG, rl=rl)
        batch = policy_batch.make(config, [[episode]], 0)
        row = batch[policy.REWARDS][0]
        np.testing.assert_array_equal(row.nonzero()[0], [4, 9])  # best fit: one row
        np.testing.assert_array_equal(row[[4, 9]], 0.75)
        lambdas = batch[policy.LAMBDAS][0]
        places = {0: 3, 1: 3, 4: 3, 8: 2, 9: 2}  # sampled tokens of their sample
        for place, count in places.items():
            self.assertAlmostEqual(lambdas[place], 1 - 1 / (1.5 * count), places=6)
        self.assertEqual(np.count_nonzero(lambdas), 5)

    def test_what_a_batch_has_for_a_token_is_found_again(self):
        """Of packed rows, in which samples stand behind each other."""
        rl = dataclasses.replace(CONFIG.rl, rows_per_step=4)
        config = dataclasses.replace(CONFIG, rl=rl)
        groups = [[make_episode([0] + [1] * n)] for n in (5, 9, 3, 12)]
        batch = policy_batch.make(config, groups, 0)
        found = policy_batch.by_sample(config, groups, batch["targets"])
        for (episode,) in groups:
            (sample,) = episode.samples
            self.assertEqual([*found[id(sample)]], [0, *sample.tokens[1:]])


class RefusedTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("alone", {"critic": False}, "group_size must be at least 2"),
        ("equal", {"dynamic_sampling": True}, "dynamic_sampling must be false"),
        ("gamma", {"gae_gamma": 1.5}, r"gae_gamma must lie in \(0, 1\], got 1.5"),
        ("alpha", {"gae_alpha": 0.0}, "gae_alpha must be > 0"),
        ("rate", {"critic_learning_rate": 0.0}, "critic_learning_rate must be > 0"),
        ("updates", {"critic_updates": 0}, "critic_updates must be at least 1"),
        ("early", {"critic_warmup_steps": -1}, "critic_warmup_steps must be >= 0"),
        (
            *("late", {"critic_warmup_steps": 4}),
            "rl.critic_warmup_steps must be smaller than num_steps, got 4 of 4",
        ),
    )
    def test_settings(self, changes, message):
        with self.assertRaisesRegex(config_lib.InputError, message):
            rl_runs.make_config(RL | changes)

    def test_other_runs_have_none(self):
        program = program_lib.make_program(CONFIG, runs.first_devices())
        for config in (
            rl_runs.make_config({"critic_warmup_steps": 99}),
            dataclasses.replace(CONFIG, stage="sft"),
        ):
            self.assertIs(critic_lib.make(config, program), critic_lib.ABSENT)
            self.assertNotIn(policy.REWARDS, program_lib.batch_shapes(config))


if __name__ == "__main__":
    environment.main()
