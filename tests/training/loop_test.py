"""A whole run at a tiny size: its files, its resumption, its end by a signal."""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from unittest import mock

import jax
import numpy as np
import pytest
from absl.testing import parameterized

from glm5_jax import command_line, presets
from glm5_jax import config as config_lib
from glm5_jax.checkpoint import manager, manifest, step_folder
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.training import loop
from glm5_jax.training.feeds import corpus
from glm5_jax.training.reporting import metrics, plot, sources
from glm5_jax.training.run import preflight, signals
from glm5_jax.training.run import state as run_lib
from glm5_jax.weights import loading
from tests import environment, runs, small_configs

ROOT = pathlib.Path(__file__).parent.parent.parent
MODEL = small_configs.TEXT_MODEL


class RunTest(runs.OneDeviceTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        small_configs.write_corpus(cls.root / "corpus")
        cls.config = small_configs.text_run(
            cls.root / "corpus",
            cls.root / "cache",
            eval_suites=("bits_per_byte",),
            eval_suite_tasks=2,
        )
        cls.enterClassContext(runs.compile_once(cls.config))
        cls.workdir = cls.root / "run"
        with mock.patch.object(plot, "plot_losses", runs.DRAW):
            cls.summary = loop.train(cls.config, cls.workdir)

    def copy(self, name):
        folder = self.root / name
        shutil.copytree(self.workdir, folder)
        return folder

    def test_leaves_the_files_of_a_run_folder(self):
        names = {path.name for path in self.workdir.iterdir()}
        wanted = {"config.json", "metrics.jsonl", "summary.json", "tokenizer.json"}
        wanted |= {"checkpoints", "samples", "loss.png"}
        self.assertContainsSubset(wanted, names)
        records = metrics.read(self.workdir / "metrics.jsonl")
        self.assertEqual([r["step"] for r in records], [1, 2, 3, 4, 5, 6])
        bits = [r["eval/bits_per_byte"] for r in records if "eval/bits_per_byte" in r]
        self.assertLen(bits, 3)
        self.assertLess(bits[-1], bits[0])
        name = "eval/bits_per_byte/24/all"
        of_suite = [r[name] for r in records if name in r]
        self.assertLen(of_suite, 3)
        self.assertLess(of_suite[-1], of_suite[0])
        summary = json.loads((self.workdir / "summary.json").read_text())
        self.assertEqual(summary["eval/bits_per_byte"], bits[-1])
        self.assertEqual(summary["perf/mfu"], "unknown")
        self.assertEqual(summary["commit"], sources.commit())
        self.assertStartsWith((self.workdir / "samples" / "6.txt").read_text(), "def")

    def test_resumed_run_ends_bit_for_bit_alike(self):
        folder = self.copy("resumed")
        shutil.rmtree(folder / "checkpoints" / "6")
        (folder / "summary.json").unlink()
        ids = (folder / "tokenizer.json").read_text()
        (folder / "tokenizer.json").write_text(ids.replace('"z":122', '"z":123'))
        with self.assertRaisesRegex(config_lib.DamagedError, "tokenizer.json is not"):
            loading.load_model(folder)
        loop.train(self.config, folder)
        self.assertEqual((folder / "tokenizer.json").read_text(), ids)
        jax.tree.map(
            np.testing.assert_array_equal,
            runs.params_of(folder, MODEL),
            runs.params_of(self.workdir, MODEL),
        )
        values = []
        for run in (folder, self.workdir):
            records = metrics.read(run / "metrics.jsonl")
            values.append([(r["step"], r["train/loss"]) for r in records])
        self.assertEqual(*values)

    def test_resumes_from_a_copy_that_is_newer_than_the_checkpoints(self):
        folder, host = self.copy("copied"), self.root / "host"
        shutil.rmtree(folder / "checkpoints" / "6")
        (folder / "summary.json").unlink()
        config = dataclasses.replace(
            self.config, host_copy_every=1, host_copy_folder=str(host)
        )
        full = mock.patch.object(
            manager.CheckpointManager, "save", side_effect=OSError("the disk is full")
        )
        with full, self.assertRaisesRegex(OSError, "full"):
            loop.train(config, folder)
        self.assertEqual(step_folder.find(folder).name, "3")
        with self.assertLogs("absl", "INFO") as logs:
            loop.train(dataclasses.replace(config, num_steps=5), folder)  # ends it
        self.assertIn("Resumes from step 5", "".join(logs.output))
        self.assertEqual(step_folder.find(folder).name, "5")
        self.assertEmpty([*host.rglob("*.shards")])
        loop.train(config, folder)
        ended = [runs.params_of(run, MODEL) for run in (folder, self.workdir)]
        jax.tree.map(np.testing.assert_array_equal, *ended)
        self.assertEmpty([*host.rglob("*.shards")])

    def test_a_sample_that_cannot_be_had_is_refused_at_the_start(self):
        for changes, message in (
            ({"sample_prompt": ""}, "sample_prompt must not be empty"),
            ({"sample_tokens": 10**6}, "sample_tokens must leave room .* of 3 tokens"),
        ):
            config = dataclasses.replace(self.config, **changes)
            with self.assertRaisesRegex(config_lib.InputError, message):
                loop.train(config, self.root / "no_sample")
        self.assertFalse((self.root / "no_sample" / "checkpoints").exists())

    def test_a_sample_that_fails_loses_nothing(self):
        folder = self.copy("unsampled")
        shutil.rmtree(folder / "checkpoints" / "6")
        (folder / "summary.json").unlink()
        shutil.rmtree(folder / "samples")
        (folder / "samples").touch()  # no folder can be made there
        with self.assertRaises(OSError):
            loop.train(self.config, folder)
        self.assertEqual(step_folder.find(folder).name, "6")
        self.assertEqual(metrics.read(folder / "metrics.jsonl")[-1]["step"], 6)

    def test_data_that_fail_lose_no_checkpoint_that_is_being_written(self):
        folder = self.copy("unfed")
        shutil.rmtree(folder / "checkpoints" / "6")
        (folder / "summary.json").unlink()
        config = dataclasses.replace(self.config, checkpoint_every=1)
        draw, seal = corpus.Corpus.next, manager.CheckpointManager._seal

        def fail_after_step_4(feed, params, position):
            if position == 4:
                raise OSError("the data are gone")
            return draw(feed, params, position)

        def seal_later(checkpoints, path):
            time.sleep(0.5)
            seal(checkpoints, path)

        with (
            mock.patch.object(corpus.Corpus, "next", fail_after_step_4),
            mock.patch.object(manager.CheckpointManager, "_seal", seal_later),
            self.assertRaisesRegex(OSError, "the data are gone"),
        ):
            loop.train(config, folder)
        self.assertTrue(step_folder.is_whole(folder, 4))

    def test_a_finished_run_stays_as_it_is(self):
        folder = self.copy("finished")
        before = runs.params_of(folder, MODEL)
        lines = (folder / "metrics.jsonl").read_text()
        with mock.patch.object(run_lib, "start", side_effect=AssertionError):
            summary = loop.train(self.config, folder)  # without compiling
        self.assertEqual((folder / "metrics.jsonl").read_text(), lines)
        self.assertEqual(summary, self.summary)
        after = runs.params_of(folder, MODEL)
        jax.tree.map(np.testing.assert_array_equal, after, before)

    def test_a_finished_run_with_a_damaged_end_is_mended(self):
        folder = self.copy("damaged_end")
        for path in (folder / "checkpoints" / "6" / "params").rglob("*"):
            if path.is_file():
                path.write_bytes(path.read_bytes()[:-1])
        loop.train(self.config, folder)
        ended = [runs.params_of(run, MODEL) for run in (folder, self.workdir)]
        jax.tree.map(np.testing.assert_array_equal, *ended)

    def test_resumes_from_a_step_of_an_earlier_version(self):
        folder = self.copy("earlier")
        checkpoints = folder / "checkpoints"
        shutil.rmtree(checkpoints / "6")
        (checkpoints / "3" / manifest.NAME).unlink()
        path = checkpoints / "3" / "metadata" / "metadata"
        metadata = json.loads(path.read_text())
        path.write_text(json.dumps({k: metadata[k] for k in ("step", "data")}))
        loop.train(self.config, folder)
        ended = [runs.params_of(run, MODEL) for run in (folder, self.workdir)]
        jax.tree.map(np.testing.assert_array_equal, *ended)

    def test_changed_data_is_refused(self):
        folder = self.copy("changed")
        (self.root / "corpus" / "40.txt").write_text("One more document. " * 40)
        try:
            with self.assertRaisesRegex(config_lib.InputError, "corpus="):
                loop.train(dataclasses.replace(self.config, num_steps=7), folder)
        finally:
            (self.root / "corpus" / "40.txt").unlink()

    def test_the_same_data_elsewhere_go_on_and_others_leave_no_trace(self):
        folder, corpus = self.copy("elsewhere"), self.root / "elsewhere_corpus"
        shutil.copytree(self.root / "corpus", corpus)
        data = dataclasses.replace(self.config.data, source=str(corpus))
        config = dataclasses.replace(self.config, data=data, num_steps=7)
        loop.train(config, folder)
        steps = [r["step"] for r in metrics.read(folder / "metrics.jsonl")]
        self.assertEqual(steps, [1, 2, 3, 4, 5, 6, 7])
        before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        (corpus / "40.txt").write_text("One more document. " * 40)
        names = (tokenizer_lib.END_OF_TEXT, "[MASK]")
        path = self.root / "elsewhere.json"
        tokenizer_lib.byte_tokenizer(names).save(path)
        data = dataclasses.replace(data, tokenizer=str(path))
        config = dataclasses.replace(config, data=data, num_steps=8)
        with self.assertRaisesRegex(
            config_lib.InputError, "changed: corpus=.*, tokenizer=.* here. Resume"
        ):
            loop.train(config, folder)
        after = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        self.assertEqual(after, before)

    def test_a_checkpoint_names_its_contents(self):
        metadata = manager.read_metadata(self.workdir)
        self.assertEqual(metadata["step"], 6)
        self.assertEqual(metadata["config"], command_line.to_json_dict(self.config))
        self.assertIn("batch_size=8", metadata["data"])
        bits = {k: v for k, v in self.summary.items() if "bits_per_byte" in k}
        self.assertIn("eval/bits_per_byte", bits)
        self.assertEqual(metadata["metrics"], bits)

    def test_data_changed_behind_the_folders_back_is_refused(self):
        folder = self.copy("edited")
        data = dataclasses.replace(self.config.data, batch_size=4)
        config = dataclasses.replace(self.config, data=data)
        (folder / "config.json").write_text(
            json.dumps(command_line.to_json_dict(config))
        )
        message = r"data\.batch_size: 8 there, 4 here"
        with self.assertRaisesRegex(config_lib.InputError, message):
            loop.train(config, folder)

    def test_a_run_whose_checkpoints_are_all_damaged_ends(self):
        folder = self.copy("damaged")
        for path in (folder / "checkpoints").iterdir():
            with (path / "params" / "_METADATA").open("a") as file:
                file.write("\n")
        with self.assertRaisesRegex(config_lib.DamagedError, "none of the steps"):
            loop.train(self.config, folder)

    def test_starts_from_the_parameters_of_another_run(self):
        parent, tuned = self.copy("parent"), self.root / "tuned"
        config = dataclasses.replace(self.config, init_from=str(parent), num_steps=2)
        loop.train(config, tuned)
        parent.rename(self.root / "parent_moved")
        config = dataclasses.replace(config, num_steps=3)
        self.assertIn("resumes from step 2", preflight.check(config, str(tuned)))
        self.assertEqual(loop.train(config, tuned)["steps"], 3)
        first = metrics.read(tuned / "metrics.jsonl")[0]
        last = metrics.read(self.workdir / "metrics.jsonl")[-1]
        self.assertAlmostEqual(first["train/lm_loss"], last["train/lm_loss"], delta=0.5)

    def test_vocabulary_that_is_too_small_is_the_users_error(self):
        model = dataclasses.replace(self.config.model, vocab_size=100)
        config = dataclasses.replace(self.config, model=model)
        with self.assertRaisesRegex(config_lib.InputError, r"model\.vocab_size"):
            loop.train(config, self.root / "small_vocabulary")

    def test_sigterm_saves_and_exits_with_143(self):
        folder = self.root / "terminated"
        # The signal comes while a step is being evaluated.
        config = dataclasses.replace(self.config, checkpoint_every=0)
        evaluate = loop.evaluate

        def terminated(run):
            os.kill(os.getpid(), signal.SIGTERM)
            return evaluate(run)

        with (
            mock.patch.object(loop, "evaluate", terminated),
            self.assertRaises(SystemExit) as caught,
        ):
            loop.train(config, folder)
        self.assertEqual(caught.exception.code, signals.EXIT_TERMINATED)
        steps = [r["step"] for r in metrics.read(folder / "metrics.jsonl")]
        self.assertEqual(step_folder.find(folder).name, str(steps[-1]))


class FiguresTest(parameterized.TestCase):
    @parameterized.parameters(({},), ({"eval/needle/64/accuracy": 0.5},))
    def test_figures_that_come_later_stay_beside_those_of_suites(self, of_suites):
        """Other devices have measured an earlier step when the next one is due."""
        arrived = {"eval/success": 0.7, "eval/version": 4}
        run = mock.MagicMock(spec=run_lib.Run)
        names = "config health feed checkpoints workdir params position to_devices"
        for name in names.split():
            setattr(run, name, mock.MagicMock())
        run.step, run.config.num_steps, run.config.log_every = 5, 100, 1
        run.health.must_roll_back.return_value = False
        run.health.counts.return_value = {}
        run.feed.evaluate_beside.return_value = True
        clock = mock.MagicMock()
        clock.read.return_value = {"perf/step_seconds": 1.0, **arrived}
        clock.goodput.return_value = {}
        loop_ = loop._Loop.__new__(loop._Loop)
        loop_._run, loop_._clock, loop_._writer = run, clock, mock.MagicMock()
        loop_._watchdog, loop_._last, loop_._pending = mock.MagicMock(), {}, {}
        with (
            mock.patch.object(loop.suites, "evaluate", return_value=of_suites),
            mock.patch.object(loop.hosts, "tell", return_value={}),
            mock.patch.object(loop_, "_end_if_reached", return_value=set()),
        ):
            loop_._settle({"evaluate"})
        written = loop_._writer.write.call_args.args[1]
        self.assertEqual(written, {"perf/step_seconds": 1.0, **arrived, **of_suites})


class RefusalTest(runs.FolderTest):
    @parameterized.named_parameters(
        ("mesh", {"mesh": config_lib.MeshConfig(data=3)}, "mesh needs as many devices"),
        ("rows", {}, "data.batch_size must be divisible by"),
    )
    def test_a_mesh_that_does_not_fit_leaves_no_folder(self, changes, message):
        config = small_configs.text_run(self.root / "corpus", self.root / "cache")
        data = dataclasses.replace(config.data, batch_size=9)
        config = dataclasses.replace(config, data=data, **changes)
        with self.assertRaisesRegex(config_lib.InputError, message):
            loop.train(config, self.root / "refused")
        self.assertFalse((self.root / "refused").exists())


@pytest.mark.slow
class KillTest(parameterized.TestCase):
    def test_killed_quickstart_ends_as_if_it_had_not_been(self):
        """SIGKILL between two checkpoints; the same command again; the same bits."""
        root = pathlib.Path(self.create_tempdir().full_path)
        config = "--config=configs/quickstart.py"
        shorter = ["num_steps=18", "checkpoint_every=3", "eval_every=0"]
        command = [sys.executable, "-m", "glm5_jax.train", config]
        command += [f"--config.{change}" for change in (*shorter, "sample_tokens=0")]
        a, b = ([*command, f"--workdir={root / name}"] for name in "ab")
        subprocess.run(a, check=True, cwd=ROOT)
        process = subprocess.Popen(b, cwd=ROOT)
        runs.wait_for_steps(root / "b", process, num_steps=8)
        process.kill()
        process.wait()
        subprocess.run(b, check=True, cwd=ROOT)
        params = [runs.params_of(root / name, presets.GLM5_1M) for name in "ab"]
        jax.tree.map(np.testing.assert_array_equal, *params)


if __name__ == "__main__":
    environment.main()
