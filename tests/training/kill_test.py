"""SIGKILL at random moments of training with saves in the background.

GLM5_JAX_KILLS=50 python -m pytest -s tests/training/kill_test.py
"""

import collections
import dataclasses
import json
import os
import pickle
import re
import sys
import time
from unittest import mock

import jax
import numpy as np
from jax.experimental import serialize_executable

from glm5_jax import command_line
from glm5_jax import config as config_lib
from glm5_jax.checkpoint import manifest
from glm5_jax.training import loop
from glm5_jax.training import program as program_lib
from glm5_jax.training.feeds import corpus
from glm5_jax.training.reporting import metrics, plot
from tests import environment, forked, runs, small_configs

KILLS = int(os.environ.get("GLM5_JAX_KILLS", "6"))
STEPS_A_LIFE = 4  # at most, and some of them lost; the last one may be on its way
SECONDS = 600  # for a life, on a machine under load


def live(config, workdir, compiled, last=None):
    """Starts or resumes the run, in a child; its program has been compiled.

    It draws no more than `last` batches, and waits to be killed then: it does not come
    to its end, however late the kill is.
    """
    environment.configure()
    program, draw = pickle.loads(compiled.read_bytes()), corpus.Corpus.next

    def held(feed, params, position):
        if last is not None and position >= last:
            time.sleep(SECONDS)
        return draw(feed, params, position)

    def load():
        return serialize_executable.deserialize_and_load(
            *program, execution_devices=jax.devices()[:1]
        )

    lowered = mock.Mock(compile=load)
    with (
        runs.use_devices(),
        mock.patch.object(os, "fsync"),  # a kill loses nothing that was written
        mock.patch.object(plot, "plot_losses"),
        mock.patch.object(corpus.Corpus, "next", held),
        # It compiles an evaluation, and there is none: eval_every is 0.
        mock.patch.object(corpus.Corpus, "prepare"),
        mock.patch.object(program_lib.Program, "lower", return_value=lowered),
    ):
        loop.train(command_line.resolve(json.loads(config)), workdir)


def num_lines(workdir):
    path = workdir / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def moment(workdir):
    """Names the work that the kill interrupted."""
    folders = [path for path in (workdir / "checkpoints").iterdir() if path.is_dir()]
    names = " ".join(path.name for path in folders)
    if "tmp" in names:
        return "within a save"
    if "deleting" in names:
        return "within a deletion"
    if not all((path / manifest.NAME).exists() for path in folders):
        return "between commit and manifest"
    return "between saves"


class LivesTest(runs.FolderTest):
    """Lives of one run, each a child process."""

    num_steps = KILLS * STEPS_A_LIFE + 2

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        small_configs.write_corpus(cls.root / "corpus")
        config = dataclasses.replace(
            small_configs.text_run(cls.root / "corpus", cls.root / "cache"),
            num_steps=cls.num_steps,
            optim=config_lib.OptimConfig(
                name="adamw", learning_rate=1e-2, end_learning_rate=1e-3
            ),
            model=small_configs.DENSE_MODEL,
            checkpoint_every=2,
            checkpoints_to_keep=2,
            eval_every=0,
            sample_tokens=0,
        )
        cls.config = json.dumps(command_line.to_json_dict(config))
        # Tracing and compiling would take most of a life's seconds.
        program = program_lib.make_program(config, runs.first_devices())
        executable = serialize_executable.serialize(program.lower().compile())
        cls.compiled = cls.root / "compiled.pickle"
        cls.compiled.write_bytes(pickle.dumps(executable))

    def start(self, workdir, last=None):
        given = self.config, workdir, self.compiled, last
        child = forked.PROCESSES.Process(target=live, args=given)
        child.start()
        self.addCleanup(child.kill)
        return child

    def finish(self, workdir):
        child = self.start(workdir)
        child.join(SECONDS)
        self.assertEqual(child.exitcode, 0)

    def assert_same_end(self, *workdirs):
        """The same parameters and losses, bit for bit."""
        params = [runs.params_of(w, small_configs.DENSE_MODEL) for w in workdirs]
        jax.tree.map(np.testing.assert_array_equal, *params)
        records = [metrics.read(w / "metrics.jsonl") for w in workdirs]
        self.assertEqual(
            *([(r["step"], r["train/loss"]) for r in run] for run in records)
        )


class KillTest(LivesTest):
    def kill_once(self, name, num_steps, wait):
        """Kills a life some time after it has done some steps; returns in what."""
        workdir = self.root / name
        goal, deadline = num_lines(workdir) + num_steps, time.monotonic() + SECONDS
        child = self.start(workdir, goal + 1)  # the next step is begun before a line
        while num_lines(workdir) < goal:
            self.assertTrue(child.is_alive(), "it ended by itself")
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.002)
        time.sleep(wait)
        child.kill()
        child.join()
        self.assertLess(child.exitcode, 0, "it ended by itself")
        return moment(workdir)

    def test_killed_run_ends_as_if_it_had_not_been(self):
        self.finish(self.root / "whole")
        records = metrics.read(self.root / "whole" / "metrics.jsonl")
        losses = [r["train/loss"] for r in records]
        self.assertLess(losses[-1], 0.8 * losses[0])
        step_seconds = np.median([r["perf/step_seconds"] for r in records])
        rng = np.random.default_rng(0)
        moments = collections.Counter(
            self.kill_once(
                "killed",
                int(rng.integers(1, STEPS_A_LIFE)),
                rng.uniform(0, step_seconds),
            )
            for _ in range(KILLS)
        )
        sys.stderr.write(f"{KILLS} kills: {dict(moments)}\n")
        self.finish(self.root / "killed")
        self.assert_same_end(self.root / "whole", self.root / "killed")
        left = [path.name for path in (self.root / "killed" / "checkpoints").iterdir()]
        self.assertEmpty([name for name in left if not re.fullmatch(r"\d+", name)])
        self.assertLen(left, 2)


if __name__ == "__main__":
    environment.main()
