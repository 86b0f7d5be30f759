"""Stage rl: a whole run, its resumption, its end where trainer and engine disagree."""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from glm5_jax import config as config_lib
from glm5_jax import environments, intervals
from glm5_jax.checkpoint import manager
from glm5_jax.environments import protocol
from glm5_jax.rl import publisher, rollouts
from glm5_jax.training import loop
from glm5_jax.training.feeds import player
from glm5_jax.training.feeds import rollouts as rl_lib
from glm5_jax.training.reporting import metrics
from glm5_jax.training.run import folder as run_folder
from glm5_jax.training.run import health as health_lib
from glm5_jax.training.run import state as run_lib
from tests import environment, runs
from tests.rl import faults
from tests.training import rl_runs

# Engine and trainer sum in another order: float32's rounding of a log-probability.
GAP_ATOL = 1e-5
ROOT = pathlib.Path(__file__).parent.parent.parent
_Fault = faults.Fault


class Mixed:
    """Each environment fails in the way that its place in a list says, or not."""

    name = "mixed"

    def __init__(self, plan):
        """`plan` is by number of the environment; those behind it are sound."""
        self._plan = iter([*plan, *[_Fault.NONE] * 100])
        self.task = faults.FaultyTaskset(_Fault.NONE).task

    def environment(self):
        return faults.FaultyTaskset(next(self._plan)).environment()

    def demonstration(self, task):
        return None


def rounded(x):
    """Keeps 8 bits of each number."""
    return jnp.asarray(np.asarray(x).astype(jnp.bfloat16).astype(x.dtype))


class RunTest(runs.OneDeviceTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.config = rl_runs.make_config()
        cls.enterClassContext(runs.compile_once(cls.config))
        cls.workdir = cls.root / "run"
        cls.played = []
        collect = rollouts.collect

        def recorded(*args, **kwargs):
            cls.played.append(collect(*args, **kwargs))
            return cls.played[-1]

        with mock.patch.object(rollouts, "collect", recorded):
            cls.summary = cls.train(cls.config, cls.workdir)

    @classmethod
    def train(cls, config, workdir, taskset=None):
        taskset = taskset or rl_runs.Lottery()
        with mock.patch.object(environments, "make", return_value=taskset):
            return loop.train(config, workdir)

    def rolled_back(self, name):
        """The run as it was after its first checkpoint, and a little later."""
        folder = self.root / name
        shutil.copytree(self.workdir, folder)
        shutil.rmtree(folder / "checkpoints" / "4")
        (folder / "summary.json").unlink()
        return folder

    def assert_same_run(self, folder):
        rl_runs.assert_same_state(folder, self.workdir, self.config)
        lines = [rl_runs.computed(run) for run in (folder, self.workdir)]
        self.assertEqual(*lines)

    def test_leaves_the_files_of_a_run_folder(self):
        names = {path.name for path in self.workdir.iterdir()}
        wanted = {"config.json", "metrics.jsonl", "summary.json", "tokenizer.json"}
        self.assertContainsSubset(wanted | {"checkpoints", "samples"}, names)
        summary = json.loads((self.workdir / "summary.json").read_text())
        low, share, high = (
            summary[f"eval/success{end}"] for end in ("_low", "", "_high")
        )
        scores = [e.reward.total for e in self.played[-1]]
        self.assertLen(scores, self.config.rl.num_eval_tasks)
        self.assertEqual(share, np.mean([score == 1 for score in scores]))
        for tag in ("2_letters", "3_letters"):
            of_tag = [e.reward.total for e in self.played[-1] if e.task.tag == tag]
            expected = np.mean([score == 1 for score in of_tag])
            self.assertEqual(summary[f"eval/success/{tag}"], expected)
        self.assertEqual(summary["eval/reward"], np.mean(scores))
        solved = intervals.proportion_interval(round(share * 8), 8)
        self.assertEqual((low, high), (solved.low, solved.high))
        self.assertBetween(share, low, high)
        sample = (self.workdir / "samples" / "4.txt").read_text()
        for episode in self.played[-1][: player.NUM_SHOWN]:
            self.assertIn(f"--- {episode.task.id}: {episode.label.value}", sample)
            self.assertIn(f"reward: {episode.reward.total:g}", sample)

    def test_every_step_trains_on_samples_of_its_own_weights(self):
        *steps, _ = self.played
        records = metrics.read(self.workdir / "metrics.jsonl")
        self.assertEqual([record["step"] for record in records], [1, 2, 3, 4])
        for version, (episodes, record) in enumerate(zip(steps, records, strict=True)):
            samples = [sample for episode in episodes for sample in episode.samples]
            versions = {v for sample in samples for v in sample.versions}
            self.assertEqual(versions, {-1, version})
            self.assertEqual(record["rollout/staleness_max"], 0)
            count = sum(sum(sample.mask) for sample in samples)
            self.assertEqual(record["rl/trained_tokens"], count)
            self.assertEqual(record["rollout/sampled_tokens"], count)
            mean = np.mean([episode.reward.total for episode in episodes])
            self.assertAlmostEqual(record["rollout/reward"], mean)
            self.assertBetween(record["rl/logprob_gap"], 1e-9, GAP_ATOL)
            self.assertLess(record["rl/logprob_gap_max"], 10 * GAP_ATOL)
            self.assertAlmostEqual(record["rl/ratio"], 1, delta=GAP_ATOL)
            self.assertEqual(record["rl/masked_fraction"], 0)
            self.assertEqual(record["rl/clip_fraction"], 0)
            ok = sum(episode.label is protocol.Label.OK for episode in episodes)
            self.assertEqual(record["rollout/label/ok"], ok)
            self.assertGreater(record["train/grad_norm"], 0.1)
            self.assertEqual(record["optim/skipped_total"], 0)

    def test_no_two_steps_or_episodes_of_a_group_sample_alike(self):
        *steps, _ = self.played
        tokens = [tuple(e.samples[0].tokens) for step in steps for e in step]
        self.assertLen(set(tokens), len(tokens))
        tasks = [episode.task.id for step in steps for episode in step]
        self.assertLen(set(tasks), 4 * self.config.rl.prompts_per_step)
        self.assertTrue(all("/train/" in task for task in tasks))

    def test_all_but_indexer_mtp_and_router_bias_is_trained(self):
        before, after = (
            rl_runs.by_path(params)
            for params in (
                rl_runs.initial_params(self.config),
                rl_runs.read_state(self.workdir, self.config)["params"],
            )
        )
        frozen = ("indexer", "mtp", "e_score_correction_bias")
        seen = set()
        for path, old in before.items():
            names = set(path) & set(frozen)
            seen |= names
            moved = np.abs(after[path] - old).max()
            (self.assertEqual if names else self.assertGreater)(moved, 0, path)
        self.assertEqual(seen, set(frozen))

    def test_resumed_run_ends_bit_for_bit_alike(self):
        folder = self.rolled_back("resumed")
        self.train(self.config, folder)
        self.assert_same_run(folder)
        samples = [
            (run / "samples" / "4.txt").read_text() for run in (folder, self.workdir)
        ]
        self.assertEqual(*samples)

    def test_evaluation_in_between_changes_nothing(self):
        """Neither what is sampled, nor what is learned; and its line is written."""
        folder = self.rolled_back("evaluated")
        config = dataclasses.replace(self.config, eval_every=3, log_every=4)
        self.train(config, folder)
        rl_runs.assert_same_state(folder, self.workdir, self.config)
        logged = rl_runs.computed(folder), rl_runs.computed(self.workdir)
        for line in logged[0]:
            self.assertIn(line, logged[1])
        records = metrics.read(folder / "metrics.jsonl")
        evaluated = [r["step"] for r in records if "eval/success" in r]
        self.assertEqual(evaluated, [3, 4])

    def test_a_wrong_engine_stops_the_run_before_it_learns(self):
        """The engine rounds its weights in step 3; once repaired, the run resumes."""
        folder, publish = self.rolled_back("stopped"), publisher.publish

        def wrong(engine, params, version, weights):
            if version == 2:
                params = jax.tree.map(rounded, params)
            publish(engine, params, version, weights)

        with (
            mock.patch.object(publisher, "publish", wrong),
            self.assertRaises(rl_lib.GapError) as caught,
        ):
            self.train(self.config, folder)
        message = str(caught.exception)
        self.assertRegex(message, "rl/logprob_gap of step 3 is .* rl.max_logprob_gap=")
        self.assertRegex(message, "rollout_weights.*router_replay.*init_from")
        self.assertIn(f"{self.config.rl.max_logprob_gap:g}", message)
        steps = {path.name for path in (folder / "checkpoints").iterdir()}
        self.assertEqual(steps, {"2"})
        *_, last = metrics.read(folder / "metrics.jsonl")
        self.assertEqual(last["step"], 3)
        self.assertGreater(last["rl/logprob_gap"], self.config.rl.max_logprob_gap)
        self.assertEqual(last["optim/skipped_total"], 1)
        self.assertEqual(last["optim/skipped_in_a_row"], 0)
        self.assertFalse((folder / "summary.json").exists())
        self.train(self.config, folder)
        self.assert_same_run(folder)

    def test_rollouts_that_give_no_finite_gradient_are_left_out(self):
        """Those of step 3 are NaN; the run ends as if they had never been played."""
        health = dataclasses.replace(
            self.config.health, max_skipped_in_a_row=1, on_not_finite="roll_back"
        )
        config = dataclasses.replace(self.config, health=health)
        plain, folders = rl_lib.Rollouts.next, [self.root / n for n in ("nan", "left")]

        def spoilt(feed, params, position):
            batch, seen = plain(feed, params, position)
            if position == 2:
                batch["advantages"] = np.full_like(batch["advantages"], np.nan)
            return batch, seen

        def left_out(feed, params, position):
            return plain(feed, params, position + 1)

        for folder, next_batch in zip(folders, (spoilt, left_out), strict=True):
            self.rolled_back(folder.name)
            with mock.patch.object(rl_lib.Rollouts, "next", next_batch):
                self.train(config, folder)
        rl_runs.assert_same_state(*folders, config)
        *_, last = metrics.read(folders[0] / "metrics.jsonl")
        self.assertEqual((last["step"], last[health_lib.ROLLBACKS]), (4, 1))

    def test_the_limit_of_a_stopped_run_may_be_raised(self):
        rl = dataclasses.replace(self.config.rl, max_logprob_gap=1.0, num_eval_tasks=2)
        config = dataclasses.replace(self.config, rl=rl)
        folder = self.rolled_back("raised")
        self.assertTrue((folder / "metrics.jsonl").exists())  # so claim compares
        run_folder.claim(folder, config)
        written = json.loads((folder / "config.json").read_text())
        self.assertEqual(written["rl"]["max_logprob_gap"], 1.0)

    def test_equal_rewards_teach_nothing_and_stop_nothing(self):
        """Dynamic sampling plays more rounds and finds nothing: all stays as it is."""
        config = rl_runs.make_config({"dynamic_sampling": True, "max_rounds": 2})
        health = dataclasses.replace(config.health, max_skipped_in_a_row=1)
        config = dataclasses.replace(config, health=health)
        folder = self.root / "equal"
        self.train(config, folder, faults.FaultyTaskset(_Fault.NONE))
        records = metrics.read(folder / "metrics.jsonl")
        self.assertLen(records, 4)
        for step, record in enumerate(records, 1):
            self.assertEqual(record["rollout/episodes"], 16)
            self.assertEqual(record["rollout/groups"], 4)
            self.assertEqual(record["rollout/dropped_equal_groups"], 4)
            self.assertEqual(record["rl/trained_tokens"], 0)
            self.assertEqual(record["train/loss"], 0)
            self.assertEqual(record["optim/skipped_total"], step)
        before = rl_runs.initial_params(config)
        after = rl_runs.read_state(folder, config)["params"]
        jax.tree.map(np.testing.assert_array_equal, after, before)

    def test_a_start_is_measured_and_a_step_of_too_few_groups_is_left_out(self):
        """The start solves a part of the tasks; then one group of two teaches."""
        n, bad = _Fault.NONE, _Fault.ENDLESS
        plan = [*[n, bad] * 4, *[n] * 4, *[n, bad] * 2]  # eight held out, two groups
        config = rl_runs.make_config(
            {
                "min_start_success": 0.5,
                "max_start_success": 0.5,
                "min_used_groups": 1.0,
            },
            num_steps=1,
        )
        with self.assertLogs(level="WARNING") as logs:
            self.train(config, self.root / "measured", Mixed(plan))
        self.assertIn("1 groups differ, and an update needs 2", "".join(logs.output))
        (record,) = metrics.read(self.root / "measured" / "metrics.jsonl")
        self.assertEqual(record["rollout/start_success"], 0.5)
        self.assertEqual(record["rollout/kept_groups"], 2)
        self.assertEqual(record["rollout/used_groups"], 0)
        self.assertEqual(record["rl/trained_tokens"], 0)
        self.assertEqual(record["optim/skipped_total"], 1)

    @parameterized.named_parameters(
        ("weak", 8, "solves 0.0% of 8 .*min_start_success=0.05.*sft"),
        ("strong", 0, "solves 100.0% of 8 .*max_start_success=0.8.*harder tasks"),
    )
    def test_a_start_out_of_the_band_is_refused(self, num_failures, message):
        band = {"min_start_success": 0.05, "max_start_success": 0.8}
        config, folder = rl_runs.make_config(band), self.root / f"band{num_failures}"
        taskset = Mixed([_Fault.ENDLESS] * num_failures)
        with self.assertRaisesRegex(config_lib.InputError, message):
            self.train(config, folder, taskset)
        self.assertEmpty(metrics.read(folder / "metrics.jsonl"))
        run_folder.claim(folder, rl_runs.make_config())  # a wider band is the same run

    def test_success_that_is_reached_ends_the_run_and_it_stays_ended(self):
        stop = {"stop_metric": "eval/success", "stop_at": 0.6, "eval_every": 1}
        config = rl_runs.make_config(**stop, checkpoint_every=0)
        bad, n = _Fault.ENDLESS, _Fault.NONE
        plan = [*[n] * 8, *[bad] * 8, *[n] * 8, *[n] * 8]  # solved after two steps
        folder = self.root / "reached"
        summary = self.train(config, folder, Mixed(plan))
        self.assertEqual((summary["steps"], summary["eval/success"]), (2, 1))
        self.assertTrue((folder / "samples" / "2.txt").exists())
        (folder / "summary.json").unlink()  # killed before it was written
        never = [bad] * 8
        again = self.train(config, folder, Mixed(never))
        self.assertEqual(again["steps"], 2)
        self.assertEqual(self.train(config, folder, Mixed(never)), again)

    def test_faults_are_counted_and_not_learned_from(self):
        n = _Fault.NONE
        plan = [
            *(_Fault.HANG_IN_STEP, n, n, n),
            *(_Fault.CRASH_IN_RESET, _Fault.REWARD_NAN, n, n),  # too few are left
            *(_Fault.FLOOD_IN_STEP, n, n, n),  # an answer too long earns 0
            *(_Fault.CRASH_IN_CLOSE, _Fault.REWARD_TEXT, n, n),
            *(_Fault.FLOOD_IN_RESET, n, n, n),
            *(_Fault.HANG_IN_CLOSE, _Fault.CRASH_IN_STEP, n, n),
            *[_Fault.REWARD_INFINITE] * 8,  # nothing is left
            *(_Fault.HANG_IN_RESET, _Fault.REWARD_RAISES, n, n),  # of the evaluation
        ]
        folder = self.root / "faults"
        config = rl_runs.make_config({"step_timeout_seconds": 0.3, "max_turns": 2})
        summary = self.train(config, folder, Mixed(plan))
        records = metrics.read(folder / "metrics.jsonl")
        labels = [
            {k.split("/")[-1]: int(v) for k, v in r.items() if "rollout/label/" in k}
            for r in records
        ]
        bad = [
            {"timeout": 1, "env_error": 1, "reward_error": 1},
            {"reward_error": 1},
            {"env_error": 2},
            {"reward_error": 8},
        ]
        for got, wanted in zip(labels, bad, strict=True):
            valid = got.pop("ok") + got.pop("truncated")
            self.assertEqual({k: v for k, v in got.items() if v}, wanted)
            self.assertEqual(valid, 8 - sum(wanted.values()))
        rewards = [record["rollout/reward"] for record in records]
        self.assertEqual(rewards, [1, 6 / 7, 1, 0])
        self.assertEqual([r["rollout/close_errors"] for r in records], [0, 1, 1, 0])
        kept = [record["rollout/kept_groups"] for record in records]
        self.assertEqual(kept, [1, 2, 2, 0])
        repeated = [record["rollout/repeated_episodes"] for record in records]
        self.assertEqual(repeated, [1, 1, 2, 0])
        norms = [record["train/grad_norm"] > 0 for record in records]
        self.assertEqual(norms, [False, True, False, False])
        used = [record["rollout/used_groups"] for record in records]
        self.assertEqual(used, [0, 1, 0, 0])  # the rewards of the others are equal
        skipped = [record["optim/skipped_total"] for record in records]
        self.assertEqual(skipped, [1, 1, 2, 3])
        self.assertEqual(summary["eval/invalid"], 2)
        self.assertEqual(summary["eval/success"], 1)
        wanted = intervals.proportion_interval(6, 6)
        self.assertEqual(summary["eval/success_low"], wanted.low)


class BadInputTest(parameterized.TestCase):
    """Each is found before anything is compiled, and says what to do."""

    @parameterized.named_parameters(
        ("unknown_environment", {"environment": "revers"}, "'revers'.*reverse"),
        ("size", {"environment": "reverse:0-99"}, "reverse"),
        ("group_of_one", {"group_size": 1}, "group_size.*1; or set critic=true"),
        ("greedy", {"temperature": 0.0}, "temperature must be > 0, got 0.0"),
        (
            *("long_answers", {"max_new_tokens": rl_runs.LENGTH}),
            "rl.max_new_tokens must be smaller than data.sequence_length.*got 40",
        ),
        ("updates", {"updates_per_rollout": 3}, "updates_per_rollout must divide.*8"),
        ("limit", {"max_logprob_gap": 0.0}, "max_logprob_gap must be > 0"),
    )
    def test_of_the_section_rl(self, rl, message):
        self.assert_refused(message, rl)

    @parameterized.named_parameters(
        ("bpe", "bpe", "data.tokenizer.*'byte_chat'.*'bpe'.*init_from"),
        ("no_special_tokens", "byte", "special tokens.*data.tokenizer='byte_chat'"),
    )
    def test_of_the_tokenizer(self, name, message):
        data = config_lib.DataConfig(tokenizer=name, sequence_length=rl_runs.LENGTH)
        self.assert_refused(message, data=data)

    def test_of_the_vocabulary(self):
        message = "model.vocab_size must be at least.*got 200"
        self.assert_refused(message, model={"vocab_size": 200})

    @parameterized.named_parameters(
        ("named", {"data": 8}, r"rl.group_size must .*got 4 on 8; set it to 8"),
        ("counted", {"data": -1}, "prompts_per_step.*got 4 on 8; set it to 8"),
    )
    def test_of_the_mesh(self, axes, message):
        mesh = config_lib.MeshConfig(**axes)
        self.assert_refused(message, {"group_size": 2}, mesh=mesh)

    def test_of_the_start(self):
        message = "There is no folder .*/nowhere"
        self.assert_refused(
            message, {"group_size": 8}, init_from="/nowhere", num_steps=1
        )

    def test_a_start_that_fails_leaves_no_threads_to_complain_at_the_exit(self):
        folder, close = self.create_tempdir().full_path, manager.CheckpointManager.close
        config = rl_runs.make_config({"group_size": 8}, num_steps=1)
        with (
            mock.patch.object(
                manager.CheckpointManager, "close", autospec=True, side_effect=close
            ) as closed,
            mock.patch.object(run_lib.Run, "compile", side_effect=MemoryError),
            self.assertRaises(MemoryError),
        ):
            loop.train(config, pathlib.Path(folder) / "run")
        closed.assert_called_once()

    def assert_refused(self, message, *args, **kwargs):
        folder = pathlib.Path(self.create_tempdir().full_path) / "run"
        with (
            self.assertRaisesRegex(config_lib.InputError, "(?s)" + message),
            mock.patch.object(run_lib.Run, "compile"),
        ):
            loop.train(rl_runs.make_config(*args, **kwargs), folder)


@pytest.mark.slow  # 40 s
class DraftsTest(parameterized.TestCase):
    def test_rollouts_draft_and_mtp_learns_along(self):
        folder = pathlib.Path(self.create_tempdir().full_path) / "run"
        config = rl_runs.make_config({"num_drafts": 1, "trains_mtp": True})
        with mock.patch.object(environments, "make", return_value=rl_runs.Lottery()):
            loop.train(config, folder)
        records = metrics.read(folder / "metrics.jsonl")
        losses = [r["train/mtp_loss"] for r in records if "train/mtp_loss" in r]
        self.assertLen(losses, config.num_steps)
        self.assertLess(max(r.get("rl/logprob_gap", 0) for r in records), GAP_ATOL)
        before, after = (
            rl_runs.by_path(params)
            for params in (
                rl_runs.initial_params(config),
                rl_runs.read_state(folder, config)["params"],
            )
        )
        for path, old in before.items():
            is_frozen = {"indexer", "e_score_correction_bias"} & set(path)
            moved = np.abs(after[path] - old).max()
            (self.assertEqual if is_frozen else self.assertGreater)(moved, 0, path)


@pytest.mark.slow
class KillTest(parameterized.TestCase):
    def test_killed_in_a_rollout_it_ends_as_if_it_had_not_been(self):
        """SIGKILL while some episodes of step 4 are over and others are not."""
        root = pathlib.Path(self.create_tempdir().full_path)
        config = rl_runs.make_config()
        command = [sys.executable, "-m", "tests.training.rl_runs"]
        steps = str(config.num_steps)
        subprocess.run([*command, root / "a", "0", steps], check=True, cwd=ROOT)
        process = subprocess.Popen(
            [*command, root / "b", "0.5", steps],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.addCleanup(process.stdout.close)
        for _ in range(3 * config.rl.num_rows + 3):
            self.assertEqual(process.stdout.readline(), "answer\n")
        process.kill()
        process.wait()
        done = [record["step"] for record in metrics.read(root / "b/metrics.jsonl")]
        self.assertEqual(done, [1, 2, 3])  # it died in the rollouts of the fourth
        subprocess.run([*command, root / "b", "0", steps], check=True, cwd=ROOT)
        rl_runs.assert_same_state(root / "b", root / "a", config)
        self.assertEqual(*(rl_runs.computed(root / name) for name in "ab"))

    def test_a_gap_is_neither_success_nor_bad_input(self):
        workdir = pathlib.Path(self.create_tempdir().full_path) / "run"
        command = [sys.executable, "-m", "glm5_jax.train", f"--workdir={workdir}"]
        command += ["--config=configs/small_rl_reverse.py"]
        changes = ["rollout_weights=int8", "max_logprob_gap=1e-9", "slots=8"]
        changes += ["min_start_success=0"]
        # Its partial rewards differ: without advantages no token is compared.
        changes += [
            "prompts_per_step=2",
            "group_size=4",
            "environment=reverse_dense:2-3",
        ]
        command += [f"--config.rl.{change}" for change in changes]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("rl.max_logprob_gap=1e-09", done.stderr.splitlines()[-1])
        self.assertEmpty(list((workdir / "checkpoints").iterdir()))


class GapTest(parameterized.TestCase):
    @parameterized.parameters(float("nan"), float("inf"), 0.051)
    def test_a_gap_that_is_no_small_number_ends_a_run(self, gap):
        feed = object.__new__(rl_lib.Rollouts)
        feed._source, feed._files, feed._workdir = mock.Mock(), None, None
        feed._config = config_lib.TrainConfig(
            stage="rl",
            rl=config_lib.RLConfig(max_logprob_gap=0.05, max_new_tokens=8),
        )
        feed.check({"rl/logprob_gap": 0.05}, 1)
        with self.assertRaises(rl_lib.GapError):
            feed.check({"rl/logprob_gap": gap}, 1)


if __name__ == "__main__":
    environment.main()
