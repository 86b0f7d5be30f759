"""Accidents of a run: what is called one, and what follows."""

import dataclasses
import shutil
import time
from concurrent import futures
from unittest import mock

import jax
import numpy as np
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax.checkpoint import manager, manifest, rollback
from glm5_jax.training import loop, replay
from glm5_jax.training.feeds import corpus as corpus_lib
from glm5_jax.training.reporting import metrics
from glm5_jax.training.run import health as health_lib
from glm5_jax.training.run import state as run_lib
from tests import environment, runs, small_configs

NAN = float("nan")


def make_health(num_steps=10**6, has_loss=True, **limits):
    return health_lib.Health(config_lib.HealthConfig(**limits), num_steps, has_loss)


def judge(health, losses, skipped=0):
    return [
        health.must_roll_back(
            step, {"train/loss": loss, "optim/skipped_in_a_row": skipped}
        )
        for step, loss in enumerate(losses, 1)
    ]


class JudgeTest(parameterized.TestCase):
    def test_a_spike_is_measured_from_the_median_and_left_out_of_it(self):
        health = make_health(spike_nats=1.0, on_spike="roll_back")
        falling = np.linspace(5, 3, 30)
        self.assertFalse(any(judge(health, falling)))
        median = float(np.median(falling))
        self.assertFalse(any(judge(health, [median + 0.99])))
        self.assertEqual(judge(health, [median + 1.1] * 3), [True] * 3)
        self.assertEqual(health.counts(), {health_lib.SPIKES: 3})

    def test_old_losses_are_forgotten(self):
        health = make_health(spike_nats=1.0, on_spike="roll_back")
        judge(health, [9.0] * health_lib.WINDOW + [3.0] * health_lib.WINDOW)
        self.assertTrue(*judge(health, [4.5]))

    def test_nothing_is_a_spike_before_there_are_losses_to_compare_with(self):
        health = make_health(spike_nats=1.0, on_spike="abort")
        judge(health, [3.0] * (health_lib.MIN_LOSSES - 1) + [30.0])
        self.assertEmpty(health.counts())

    def test_a_spike_that_is_counted_changes_nothing(self):
        health = make_health(on_spike="count")
        self.assertFalse(any(judge(health, [3.0] * 20 + [9.0])))
        self.assertEqual(health.counts(), {health_lib.SPIKES: 1})

    def test_the_loss_of_a_policy_gradient_says_nothing(self):
        health = make_health(has_loss=False, on_spike="abort")
        self.assertFalse(any(judge(health, [0.0] * 20 + [50.0])))

    @parameterized.named_parameters(
        ("spike", {"on_spike": "abort"}, [3.0] * 20 + [9.0], 0, "step 21 is 9.000"),
        ("not_finite", {"max_skipped_in_a_row": 2}, [NAN], 2, "of 2 steps in a row"),
        ("all_of_a_short_run", {"num_steps": 3}, [NAN], 3, "of 3 steps in a row"),
        ("loss_not_finite", {"on_spike": "abort"}, [3.0] * 20 + [NAN], 0, "21 is nan"),
        (
            "too_many_rollbacks",
            {"on_spike": "roll_back", "max_rollbacks": 0},
            [3.0] * 20 + [9.0],
            0,
            "already rolled back 0 times",
        ),
    )
    def test_failures_that_end_a_run(self, limits, losses, skipped, message):
        with self.assertRaisesRegex(FloatingPointError, message):
            judge(make_health(**limits), losses, skipped)

    def test_it_remembers_finitely_many_losses(self):
        health = make_health()
        judge(health, [3.0, NAN, float("inf"), 4.0])
        self.assertEqual(health.memory()["losses"], [3.0, 4.0])

    def test_memory_resumes_where_it_was(self):
        health, other = (make_health(on_spike="roll_back") for _ in range(2))
        judge(health, [3.0] * 20 + [9.0])
        health.roll_back(health.memory())
        other.resume(health.memory())
        self.assertEqual(other.memory(), health.memory())
        self.assertEqual(other.counts()[health_lib.ROLLBACKS], 1)
        self.assertTrue(*judge(other, [9.0]))

    @parameterized.parameters(
        ({"spike_nats": 0.0}, "spike_nats must be > 0"),
        ({"max_rollbacks": -1}, "max_rollbacks must not be negative"),
        ({"watchdog_seconds": -1.0}, "watchdog_seconds must not be negative"),
    )
    def test_bad_limits(self, limits, message):
        with self.assertRaisesRegex(config_lib.InputError, message):
            config_lib.HealthConfig(**limits)


class AccidentTest(runs.OneDeviceTest):
    """Real runs, some of whose batches are spoilt."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        small_configs.write_corpus(cls.root / "corpus")
        config = small_configs.text_run(cls.root / "corpus", cls.root / "cache")
        cls.config = dataclasses.replace(
            config, num_steps=12, eval_every=0, sample_tokens=0
        )
        cls.enterClassContext(mock.patch.object(health_lib, "MIN_LOSSES", 4))
        cls.enterClassContext(runs.compile_once(config))  # of fewer steps

    def train(self, name, spoil=lambda batch, position: batch, **limits):
        """A run whose batches are spoilt by their position."""
        plain = corpus_lib.Corpus.next

        def next_batch(feed, params, position):
            batch, seen = plain(feed, params, position)
            return spoil(batch, position), seen

        health = config_lib.HealthConfig(**limits)
        config = dataclasses.replace(self.config, health=health)
        with mock.patch.object(corpus_lib.Corpus, "next", next_batch):
            return loop.train(config, self.root / name)

    def records(self, name):
        return metrics.read(self.root / name / "metrics.jsonl")

    def params(self, name):
        return runs.params_of(self.root / name, small_configs.TEXT_MODEL)

    def test_one_gradient_that_is_not_finite_is_skipped(self):
        self.train("nan", without_a_number({5}))
        records = self.records("nan")
        self.assertLen(records, 12)
        self.assertEqual([r["optim/skipped_total"] for r in records[4:7]], [0, 1, 1])
        self.assertIsNone(records[5]["train/loss"])
        self.assertTrue(np.isfinite(records[-1]["train/loss"]))

    def test_a_skipped_batch_is_a_function_of_its_position(self):
        """As docs/faults.md says how to get it again."""
        seen = {}

        def spoil(batch, position):
            seen[position] = batch
            return without_a_number({5})(batch, position)

        self.train("again_drawn", spoil)
        feed = run_lib.make_feed(replay.config_of(self.root / "again_drawn"))
        batch, _ = feed.next({}, 5)
        jax.tree.map(np.testing.assert_array_equal, batch, seen[5])

    def test_many_of_them_end_the_run_which_can_go_on(self):
        with self.assertRaisesRegex(
            FloatingPointError, "of 3 steps in a row, the last"
        ):
            self.train("nans", without_a_number({7, 8, 9}), max_skipped_in_a_row=3)
        self.assertEqual([r["step"] for r in self.records("nans")], [*range(1, 11)])
        self.assertFalse((self.root / "nans" / "summary.json").exists())
        self.train("nans", max_skipped_in_a_row=4)  # limits may change
        self.assertEqual([r["step"] for r in self.records("nans")], [*range(1, 13)])

    def test_many_of_them_are_left_behind_by_a_rollback(self):
        limits = {"max_skipped_in_a_row": 2, "on_not_finite": "roll_back"}
        summary = self.train("left", without_a_number({7, 8, 9}), **limits)
        # From step 8 to 6: batches 6, 7, 8 are behind it; 9 alone is skipped.
        self.assertEqual(summary["goodput/lost_steps"], 3)
        self.assertEqual(self.records("left")[-1][health_lib.ROLLBACKS], 1)
        self.assertEqual(self.records("left")[-1]["optim/skipped_total"], 1)

    def test_a_spike_is_rolled_back_and_its_batches_do_not_come_again(self):
        limits = {"spike_nats": 1.0, "on_spike": "roll_back"}
        summary = self.train("spike", with_wrong_targets({7}), **limits)
        self.assertEqual(summary["goodput/lost_steps"], 2)
        self.assertBetween(summary["goodput/share"], 0, 1)
        steps = [record["step"] for record in self.records("spike")]
        self.assertEqual(steps, [*range(1, 13)])
        self.assertEqual(self.records("spike")[-1][health_lib.ROLLBACKS], 1)
        self.assertEqual(self.records("spike")[-1][health_lib.SPIKES], 1)
        plain = corpus_lib.Corpus.next

        def without_6_and_7(feed, params, position):
            return plain(feed, params, position + 2 * (position >= 6))

        with mock.patch.object(corpus_lib.Corpus, "next", without_6_and_7):
            self.train("wanted")
        same = np.testing.assert_array_equal
        jax.tree.map(same, self.params("spike"), self.params("wanted"))
        # Killed after the rollback it ends as it has ended.
        shutil.copytree(self.root / "spike", self.root / "killed")
        shutil.rmtree(self.root / "killed" / "checkpoints" / "12")
        self.train("killed", with_wrong_targets({7}), **limits)
        jax.tree.map(same, self.params("killed"), self.params("wanted"))
        self.assertEqual(self.records("killed")[-1][health_lib.ROLLBACKS], 1)

    def test_a_run_goes_back_by_hand(self):
        self.train("by_hand")
        rollback.by_hand(self.root / "by_hand", 6, num_left_out=2)
        seen = []

        def see(batch, position):
            seen.append(position)
            return batch

        summary = self.train("by_hand", see)
        self.assertEqual(seen, [*range(8, 14)])
        self.assertEqual(summary["goodput/lost_steps"], 6)
        steps = [record["step"] for record in self.records("by_hand")]
        self.assertEqual(steps, [*range(1, 13)])
        metadata = manager.read_metadata(self.root / "by_hand")
        self.assertEqual((metadata["step"], metadata["position"]), (12, 14))
        left = {path.name for path in (self.root / "by_hand" / "checkpoints").iterdir()}
        self.assertEqual(left, {"6", "9", "12"})

    def test_a_rollback_is_known_before_the_next_checkpoint(self):
        limits = {"spike_nats": 1.0, "on_spike": "roll_back", "max_rollbacks": 1}
        spoil = with_wrong_targets({7, 9})
        for _ in range(2):  # started again it does not begin to count anew
            with self.assertRaisesRegex(FloatingPointError, "rolled back 1 times"):
                self.train("again", spoil, **limits)
        limits["max_rollbacks"] = 2
        self.train("again", spoil, **limits)
        self.assertEqual(self.records("again")[-1][health_lib.ROLLBACKS], 2)

    def test_a_rollback_to_the_same_step_goes_further_back(self):
        """Step 6 was saved after the blow-up: whatever follows it is a spike."""
        limits = {"spike_nats": 1.0, "on_spike": "roll_back", "max_rollbacks": 2}
        seen = []

        def spoil(batch, position):
            seen.append(position)
            return with_wrong_targets({7, 9})(batch, position)

        self.train("further", spoil, **limits)
        # 6 and 7 undone, then what followed; then all since step 3, but for batches.
        self.assertEqual(seen[-9:], [*range(10, 19)])
        names = {p.name for p in (self.root / "further" / "checkpoints").iterdir()}
        self.assertEqual(names, {"6", "9", "12"})
        self.assertEqual(self.records("further")[-1][health_lib.ROLLBACKS], 2)
        steps = [record["step"] for record in self.records("further")]
        self.assertEqual(steps, [*range(1, 13)])

    def test_a_rollback_waits_for_the_checkpoint_on_its_way(self):
        seal = manifest.seal

        def slow(*args, **kwargs):
            time.sleep(0.5)
            return seal(*args, **kwargs)

        limits = {"max_skipped_in_a_row": 1, "on_not_finite": "roll_back"}
        with mock.patch.object(manifest, "seal", slow):
            self.train("slow", without_a_number({3}), **limits)
        self.assertEqual(self.records("slow")[-1][health_lib.ROLLBACKS], 1)

    def test_a_save_that_fails_ends_the_run_before_the_next(self):
        save = run_lib.Run.save

        def seal(*args, **kwargs):
            raise OSError("no space left on device")

        def save_and_wait(run, metrics):
            save(run, metrics)
            futures.wait([run.checkpoints._pending])

        with (
            mock.patch.object(manifest, "seal", seal),
            mock.patch.object(run_lib.Run, "save", save_and_wait),
            self.assertRaisesRegex(OSError, "no space left"),
        ):
            self.train("full")
        # That after step 3 failed; step 4 was on its way.
        self.assertEqual([r["step"] for r in self.records("full")], [1, 2, 3, 4])

    def test_nothing_to_roll_back_to(self):
        limits = {"max_skipped_in_a_row": 1, "on_not_finite": "roll_back"}
        with self.assertRaisesRegex(FloatingPointError, "no checkpoint to roll back"):
            self.train("nothing", without_a_number({1}), **limits)


def without_a_number(positions):
    """Batches whose gradient is not finite."""

    def spoil(batch, position):
        if position not in positions:
            return batch
        return {**batch, "loss_mask": np.full_like(batch["loss_mask"], NAN)}

    return spoil


def with_wrong_targets(positions):
    """Batches whose text makes no sense, of tokens that the model has not seen."""

    def spoil(batch, position):
        if position not in positions:
            return batch
        return {**batch, "targets": np.full_like(batch["targets"], 7)}

    return spoil


if __name__ == "__main__":
    environment.main()
